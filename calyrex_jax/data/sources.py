"""Conversations from JSON Lines files: every fault is found, with its line, before anything else happens."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.validate import validate

_REMEDY = "write one JSON object a line in UTF-8"


def read_jsonl(path: Path | str) -> list[tuple[str, dict[str, Any]]]:
    """[(file:line, object), …] of a JSON Lines file; blank lines are skipped, a byte-order mark is accepted.

        read_jsonl("chats.jsonl")[0]      # ('chats.jsonl:1', {'messages': [...]})

    Raises UserError with file:line for bytes that are not UTF-8, malformed JSON, bare NaN or Infinity, half a surrogate
    pair, a line that is not an object; and for a file that is absent or holds nothing.
    """
    return list(iter_jsonl(path))


def iter_jsonl(path: Path | str) -> Iterator[tuple[str, dict[str, Any]]]:
    """`read_jsonl` line by line, for files that should not be held as a whole."""
    empty = True
    for number, line in enumerate(_lines(path), start=1):
        if number == 1:
            if line.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise UserError(f"{path}:1: UTF-16, expected UTF-8; {_REMEDY}")
            line = line.removeprefix(b"\xef\xbb\xbf")
        if line.strip():
            empty = False
            where = f"{path}:{number}"
            yield where, _parse(line.removesuffix(b"\n"), where)
    if empty:
        raise UserError(f"{path}: empty, at least one line is needed; {_REMEDY}")


def _lines(path: Path | str) -> Iterator[bytes]:
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as file:
            yield from file
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def read_bytes(path: Path | str) -> bytes:
    """A file's content, unpacked where its name ends in .gz. Raises UserError for one that cannot be read."""
    try:
        data = Path(path).read_bytes()
        return gzip.decompress(data) if str(path).endswith(".gz") else data
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path | str, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or error
    return UserError(f"{path}: cannot be read ({reason}); name an existing file that is whole")


def load_conversations(path: Path | str) -> list[tuple[str, dict[str, Any]]]:
    """`read_jsonl` of a file of conversations, each checked by `validate`; other keys than messages pass through.

    Raises UserError with file:line at the first fault.
    """
    rows = read_jsonl(path)
    for where, row in rows:
        validate(row, where)
    return rows


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start + 1} of the line is not UTF-8 (0x{line[error.start]:02x}); {_REMEDY}"
        ) from error

    def refuse(constant: str) -> NoReturn:
        raise UserError(f"{where}: {constant} is not JSON; write null or a number")

    try:
        value = json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: malformed JSON ({error.msg} at column {error.colno}); {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: JSON that cannot be read ({error}); {_REMEDY}") from error
    if not isinstance(value, dict):
        raise UserError(f'{where}: {type(value).__name__}, expected an object with "messages"; {_REMEDY}')
    if "\\u" in text:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise UserError(
                f"{where}: half of a surrogate pair (\\ud800 to \\udfff), which is no character; write the whole pair"
            ) from error
    return value
