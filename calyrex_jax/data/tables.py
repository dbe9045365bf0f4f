"""Rows of a data set's files, whatever their format: JSON Lines (also .gz), JSON, csv, Parquet; a path or `hf:OWNER/NAME`."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.sources import iter_jsonl, read_bytes, read_jsonl

Rows = list[tuple[str, dict[str, Any]]]

_HELD_OUT = re.compile(r"(?<![a-z])(test|val|valid|validation|dev|eval|evaluation)(?![a-z])", re.IGNORECASE)


def data_files(source: str, what: str) -> tuple[list[Path], list[str]]:
    """The files to read of a file, a directory or `hf:OWNER/NAME`, and the names of those left out.

    A directory's files are read in the order of their names, without those whose name or folder says that they are held
    out (test, validation, …): to read such a file, name it. Raises UserError where there is nothing to read.
    """
    root = _fetched(source.removeprefix("hf:"), what) if source.startswith("hf:") else Path(source).expanduser()
    if not root.exists():
        raise UserError(f"{what}: {source!r} is no file and no directory; give a path, or hf:OWNER/NAME")
    if root.is_file():
        if _reader(root) is None:
            raise UserError(f"{root}: unknown format, expected {', '.join(READERS)}; convert it to JSON Lines")
        return [root], []
    found = sorted(p for p in root.rglob("*") if p.is_file() and _reader(p) is not None)
    names = {path: path.relative_to(root).as_posix() for path in found}
    kept = [path for path in found if not _HELD_OUT.search(names[path])]
    if not kept:
        some = ", ".join(list(names.values())[:5]) + (", …" if len(found) > 5 else "")
        rest = f" but held-out ones ({some}); name one of them" if found else f" ({', '.join(READERS)})"
        raise UserError(f"{what}: {source} holds no data files{rest}")
    return kept, [names[path] for path in found if path not in kept]


def read_table(path: Path) -> Rows:
    """[(file:line, row), …]; of Parquet and JSON lists the number is the row's. UserError where it cannot be read.

    A file whose name tells no format is read as JSON Lines.
    """
    return list(iter_table(path))


def iter_table(path: Path) -> Iterable[tuple[str, dict[str, Any]]]:
    """`read_table` row by row; of JSON Lines and Parquet only a part is held at a time."""
    return (_reader(path) or iter_jsonl)(path)


def _json(path: Path) -> Rows:
    """A list of objects; or, as some data sets name them, JSON Lines."""
    try:
        value = json.loads(read_bytes(path).decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    except (ValueError, RecursionError):
        return read_jsonl(path)
    if isinstance(value, dict):
        return read_jsonl(path)
    wrong = next((i for i, row in enumerate(value, 1) if not isinstance(row, dict)), None) if isinstance(value, list) else 0
    if wrong is not None:
        raise UserError(f"{path}:{wrong}: expected a list of JSON objects; write one JSON object a line in a .jsonl file")
    return [(f"{path}:{number}", row) for number, row in enumerate(value, 1)]


def _csv(path: Path) -> Rows:
    try:
        text = read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start + 1} is not UTF-8; save the file as UTF-8") from None
    rows: Rows = []
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    start = 2
    try:
        for row in reader:
            if None in row or None in row.values():
                raise UserError(
                    f"{path}:{start}: not as many fields as the header's {len(reader.fieldnames or ())}; mend the quotes"
                )
            rows.append((f"{path}:{start}", row))
            start = reader.line_num + 1
    except csv.Error as error:
        raise UserError(f"{path}:{start}: malformed csv ({error}); mend the quotes") from None
    return rows


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            f"{path}: Parquet needs pyarrow, which is not installed; pip install 'calyrex_jax[parquet]', or convert the "
            "file: pandas.read_parquet(FILE).to_json(NEW, orient='records', lines=True) writes JSON Lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}:{number}", row
    except (OSError, ValueError) as error:  # pyarrow's errors derive from these
        raise UserError(f"{path}: not readable as Parquet ({' '.join(str(error).split())[:160]}); fetch it again") from None


Reader = Callable[[Path], Iterable[tuple[str, dict[str, Any]]]]

READERS: dict[str, Reader] = {
    ".jsonl": iter_jsonl,
    ".jsonl.gz": iter_jsonl,
    ".json": _json,
    ".json.gz": _json,
    ".csv": _csv,
    ".csv.gz": _csv,
    ".parquet": _parquet,
}


def _reader(path: Path) -> Reader | None:
    return next((reader for ending, reader in READERS.items() if path.name.lower().endswith(ending)), None)


def _fetched(name: str, what: str) -> Path:
    """A hub data set's files, in Hugging Face's own cache."""
    repository, _, revision = name.partition("@")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise UserError(f"{what}: hf:{name} is not understood, expected hf:OWNER/NAME, or hf:OWNER/NAME@REVISION")
    import huggingface_hub  # slow to import, and needed by this form alone

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, repo_type="dataset", revision=revision or None, allow_patterns=[f"*{end}" for end in READERS]
            )
        )
    except (OSError, ValueError) as error:  # the hub's errors derive from these
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{what}: hf:{name} cannot be fetched ({type(error).__name__}: {reason}); check the name, the network and, for "
            "gated data sets, your login (hf auth login); or download it elsewhere and give the directory"
        ) from None
