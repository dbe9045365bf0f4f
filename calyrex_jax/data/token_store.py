"""Encoded conversations on disk, memory-mapped: a resumed run reads no text, and nothing is held twice.

A store is a directory that appears only once it is whole: tokens and marks of all conversations one after the other, their
ends, their kinds, their places in the source, and meta.json with the key, the account of the reading and a digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.account import Account
from calyrex_jax.data.chat import Example

ORIGINS = ("none", "template", "caller")
_SYSTEM, _TARGET = 1, 2  # bits of a token's mark
_SHIELDED, _DISTILL = 4, 8  # bits of a conversation's kind, above its origin
_ARRAYS = {"tokens": np.int32, "marks": np.uint8, "ends": np.int64, "kinds": np.uint8}
_FILES = (*_ARRAYS, "places")


class TokenStore(Sequence[Example]):
    """The examples of one source, read from disk when they are asked for.

        store = TokenStore.open(directory, key) or TokenStore.write(directory, key, encoded, account)
        store[4].tokens

    lengths  [N] int64, tokens of each
    account  of the rows that became these examples, as the reading left it
    """

    def __init__(self, directory: Path, account: Account):
        self.directory, self.account = directory, account
        arrays = {name: _mapped(directory / name, dtype) for name, dtype in _ARRAYS.items()}
        self._tokens, self._marks, self._kinds = arrays["tokens"], arrays["marks"], arrays["kinds"]
        self._starts = np.concatenate([[0], arrays["ends"]])
        self.lengths = np.diff(self._starts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        here = slice(self._starts[index], self._starts[index + 1])
        marks, kind = self._marks[here], int(self._kinds[index])
        return Example(
            tokens=self._tokens[here],
            system=(marks & _SYSTEM).view(np.bool_),
            targets=(marks & _TARGET).astype(np.bool_),
            origin=ORIGINS[kind & 3],
            shielded=bool(kind & _SHIELDED),
            distill=bool(kind & _DISTILL),
        )

    @property
    def shielded(self) -> np.ndarray:
        """[N] bool, conversations that held special tokens' text."""
        return (self._kinds & _SHIELDED).astype(np.bool_)

    @property
    def targets(self) -> np.ndarray:
        """[N] int64, targets of each."""
        if not len(self):
            return np.empty(0, np.int64)
        return np.add.reduceat((self._marks & _TARGET) // _TARGET, self._starts[:-1], dtype=np.int64)

    def places(self) -> list[str]:
        """Where each came from, `file:line`."""
        return json.loads((self.directory / "places").read_text(encoding="utf-8"))

    @classmethod
    def open(cls, directory: Path, key: dict) -> TokenStore | None:
        """The store of `key`; None where there is none, or it is not as it was written."""
        try:
            meta = json.loads((directory / "meta.json").read_text(encoding="utf-8"))
            if meta["key"] != key or meta["digest"] != _digest(directory):
                return None
            account = meta["account"]
            return cls(directory, Account(**account | {"dropped": Counter(account["dropped"])}))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @classmethod
    def write(cls, directory: Path, key: dict, encoded: Iterable[tuple[str, Example]], account: Account) -> TokenStore:
        """Writes a store of (place, example) pairs; `account` is kept as it is when they end.

        Raises UserError where the disk refuses. An error from `encoded` passes through and leaves nothing behind.
        """
        made: Path | None = None
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=".writing-", dir=directory.parent))
            made.chmod(0o755)
            _write_arrays(made, encoded)
            meta = {"key": key, "digest": _digest(made), "account": _as_dict(account)}
            (made / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
            _put(made, directory, key)
        except OSError as error:
            raise UserError(
                f"{directory.parent}: encoded conversations cannot be written ({error.strerror or error}); free the disk, or "
                "name another directory in config.data.token_dir"
            ) from None
        finally:
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            with contextlib.suppress(OSError):
                directory.parent.rmdir()  # only where nothing is in it
        store = cls.open(directory, key)
        if store is None:
            raise UserError(f"{directory}: what was written there does not read back; check the disk")
        return store


def _write_arrays(directory: Path, encoded: Iterable[tuple[str, Example]]) -> None:
    ends, kinds, places, end = [], [], [], 0
    with (directory / "tokens").open("wb") as tokens, (directory / "marks").open("wb") as marks:
        for place, example in encoded:
            end += len(example.tokens)
            ends.append(end)
            kinds.append(ORIGINS.index(example.origin) | _SHIELDED * example.shielded | _DISTILL * example.distill)
            places.append(place)
            tokens.write(np.asarray(example.tokens, np.int32).tobytes())
            marks.write((example.system * np.uint8(_SYSTEM) | example.targets * np.uint8(_TARGET)).tobytes())
    np.asarray(ends, _ARRAYS["ends"]).tofile(directory / "ends")
    np.asarray(kinds, _ARRAYS["kinds"]).tofile(directory / "kinds")
    (directory / "places").write_text(json.dumps(places), encoding="utf-8")


def _put(made: Path, directory: Path, key: dict) -> None:
    """Moves a finished store to its place, unless another process was first; a broken one there gives way."""
    if directory.exists() and TokenStore.open(directory, key) is None:
        shutil.rmtree(directory)
    try:
        os.replace(made, directory)
    except OSError:
        if TokenStore.open(directory, key) is None:
            raise


def _mapped(path: Path, dtype) -> np.ndarray:
    """A file as a read-only array; an empty file cannot be mapped."""
    return np.asarray(np.memmap(path, dtype, "r")) if path.stat().st_size else np.empty(0, dtype)


def _digest(directory: Path) -> str:
    digest = hashlib.sha256()
    for name in _FILES:
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _as_dict(account: Account) -> dict:
    return {"read": account.read, "kept": account.kept, "dropped": dict(account.dropped), "places": account.places}
