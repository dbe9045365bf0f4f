"""Evaluation files that a user brings, JSON Lines or csv: a path, or `hf:OWNER/NAME`, a data set on the hub with one .jsonl file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.tables import read_table


def read_rows(source: str, fields: dict[str, type | tuple[type, ...]], what: str) -> list[tuple[str, dict[str, Any]]]:
    """[(file:line, row), …] of which every row has the fields, of their types.

    Raises UserError with file:line for a row without them, and for a hub that cannot be reached.
    """
    rows = read_table(local_file(source, what))
    for where, row in rows:
        for name, kind in fields.items():
            if not isinstance(row.get(name), kind):
                got = type(row[name]).__name__ if name in row else "nothing"
                wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
                raise UserError(
                    f'{where}: "{name}" is {got}, expected {wanted}; {what} needs the fields {", ".join(fields)}'
                )
    return rows


def local_file(source: str, what: str) -> Path:
    """The file itself, or what `hf:OWNER/NAME` brings."""
    if not source.startswith("hf:"):
        return Path(source).expanduser()
    from huggingface_hub import HfApi, hf_hub_download

    name = source.removeprefix("hf:")
    remedy = "download the file and give its path"
    try:
        names = [n for n in HfApi().list_repo_files(name, repo_type="dataset") if n.endswith(".jsonl")]
        if len(names) != 1:
            raise UserError(f"{source}: {len(names)} .jsonl files ({', '.join(names[:5])}), {what} needs one; {remedy}")
        return Path(hf_hub_download(name, names[0], repo_type="dataset"))
    except UserError:
        raise
    # the hub's client raises its own, its transport's and plain OS errors for what is all the same to a user
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{source}: cannot be fetched from the hub ({reason[:160]}); {remedy}") from None
