"""Conversations as ArrayRecord files, through a TFDS builder and without TensorFlow: random access, any size.

write_records(conversations, Path("corpus"))     # corpus/: dataset_info.json, features.json, *.array_record-…
for where, row in read_records("corpus"): …      # also what other TFDS builders wrote, where it has turns
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import UserError

_BLOCK = 512  # records decoded in one call
_MARK = "dataset_info.json"


def write_records(conversations: Iterable[tuple[str, dict[str, Any]]], directory: Path) -> int:
    """Writes the conversations, in their order, as the split `train`; returns how many.

    `directory` appears only once everything is in it. Features: messages (a sequence of role and content), distill,
    where (the place in the source). Raises UserError where it exists already, cannot be written, or gets nothing.
    """
    refuse_existing(directory)
    stream = _Stream(conversations)
    if not stream.more():
        return 0
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
            with contextlib.redirect_stdout(io.StringIO()):  # TFDS says much there
                builder = _builder_class()(stream, data_dir=temporary, file_format="array_record")
                builder.download_and_prepare()
            os.replace(builder.data_dir, directory)
    except OSError as error:
        raise UserError(
            f"{directory}: cannot be written ({error.strerror or error}); free the disk or choose another --output"
        ) from None
    return stream.count


def refuse_existing(directory: Path) -> None:
    """UserError where the directory holds anything."""
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        raise UserError(f"{directory}: exists already; choose another --output, or remove it first")


class _Stream:
    """An iterator that knows whether anything is left, and keeps the fault that ended it as it was."""

    def __init__(self, rows: Iterable[tuple[str, dict[str, Any]]]):
        self._rows, self._next, self.count = iter(rows), None, 0

    def more(self) -> bool:
        self._next = next(self._rows, None)
        return self._next is not None

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        while self._next is not None:
            yield self._next
            self.count += 1
            self.more()


@functools.cache
def _builder_class():
    tfds = _tfds()

    class Conversations(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        """Conversations of system, user, assistant and tool messages."""

        name = "conversations"
        VERSION = tfds.core.Version("1.0.0")
        code_path = None  # TFDS looks there for checksums of downloads, with a package that it does not install

        def __init__(self, stream: _Stream, **options):
            self._stream = stream
            super().__init__(**options)

        def _info(self):
            import numpy as np

            text = tfds.features.Text()
            features = {
                "messages": tfds.features.Sequence({"role": text, "content": text}),
                "distill": tfds.features.Scalar(np.bool_),
                "where": text,
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True, description=self.__doc__
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number, (where, conversation) in enumerate(self._stream):
                messages = [{"role": m["role"], "content": m["content"]} for m in conversation["messages"]]
                yield number, {"messages": messages, "distill": conversation.get("distill", False), "where": where}

    return Conversations


def _tfds():
    import tensorflow_datasets as tfds  # slow to import, and needed by these files alone

    tfds.disable_progress_bar()
    return tfds


def find_records(directory: str | Path) -> Path:
    """The directory that holds dataset_info.json: the one given, or the only one below it (TFDS nests NAME/VERSION).

    Raises UserError where there is none or more than one.
    """
    root = Path(directory).expanduser()
    if (root / _MARK).is_file():
        return root
    found = sorted(path.parent for path in root.rglob(_MARK)) if root.is_dir() else []
    if len(found) != 1:
        names = ", ".join(str(path) for path in found)
        raise UserError(
            f"tfds:{directory}: "
            + (
                f"{len(found)} data sets below it ({names}); name one of them"
                if found
                else f"no {_MARK} in it; python -m calyrex_jax.prepare --source=… --output=DIR makes such a directory"
            )
        )
    return found[0]


def read_records(directory: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of the split `train`, texts as str. Raises UserError where it cannot be read without TensorFlow."""
    root = find_records(directory)
    tfds = _tfds()
    try:
        builder = tfds.builder_from_directory(str(root))
        source = builder.as_data_source("train")
        count = len(source)
    # whatever TFDS says of a foreign data set (it raises a dozen kinds) is passed on as the reason; nothing of ours runs here
    except Exception as error:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"tfds:{root}: cannot be read ({said}); it must hold a split train as array_record; prepare it anew with "
            "python -m calyrex_jax.prepare"
        ) from error
    for at in range(0, count, _BLOCK):
        numbers = range(at, min(at + _BLOCK, count))
        for number, row in zip(numbers, source.__getitems__(numbers), strict=True):
            row = _plain(row)
            yield row.pop("where", None) or f"{root}:{number}", row


def _plain(value: Any) -> Any:
    """Bytes as texts, arrays and numpy's scalars as Python's own."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return [_plain(item) for item in value] if isinstance(value, list) else value
