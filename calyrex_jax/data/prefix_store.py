"""The prefix cache: hidden states at the first adapter boundary, on disk, so that later epochs skip the layers below."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from calyrex_jax.core.errors import UserError

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _amount(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"


class PrefixStore:
    """[T, D] arrays by example index in one file, with a flag an example that is set only once its states are on disk.

        store = PrefixStore.open("cache", {"checkpoint": "ab…", "boundary": 26}, lengths, embed_dim=576, dtype="bfloat16")
        for part in plan_pass(lengths, 8, store.missing()):
            store.write(indices, states)
        batch_prefix = store.batch(((4,), (7, 2)), length=256)      # [2, 256, 576]

    A store lives in a subdirectory named by the hash of its key and lengths, so a changed model or corpus never meets old
    states; other stores are reported and left alone.
    """

    def __init__(self, path: Path, lengths: Sequence[int], embed_dim: int, dtype: str):
        self.path, self.embed_dim, self.dtype = path, embed_dim, DTYPES[dtype]
        self._starts = np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))])
        self.num_bytes = self.size(lengths, embed_dim, dtype)

    @staticmethod
    def size(lengths: Sequence[int], embed_dim: int, dtype: str) -> int:
        """Bytes that the states of all examples take."""
        return int(np.sum(np.asarray(lengths, np.int64))) * embed_dim * DTYPES[dtype].itemsize

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike,
        key: dict,
        lengths: Sequence[int],
        embed_dim: int,
        dtype: str,
        report: Callable[[str], None] = _say,
    ) -> PrefixStore:
        """Opens the store of `key`, or reserves its disk space; `report` gets one line with the size beforehand.

        Raises UserError for no examples, an unknown dtype, an unwritable directory, or too little free disk space.
        """
        if dtype not in DTYPES:
            raise UserError(f"config: the prefix cache's type is {dtype!r}; expected one of {', '.join(DTYPES)}")
        if not len(lengths):
            raise UserError(
                "prefix cache: there is no example to store; at least 1 is needed; check data.source and data.max_length"
            )
        store, text = cls._named(directory, key, lengths, embed_dim, dtype)
        try:
            store.path.mkdir(parents=True, exist_ok=True)
            store._reserve(text, store.path.parent, report)
        except OSError as error:
            raise UserError(
                f"prefix cache: {error.strerror or error} at {store.path}; a writable directory with "
                f"{_amount(store.num_bytes)} free is needed; choose another cache directory or turn the cache off"
            ) from error
        store._map()
        return store

    @classmethod
    def finished(
        cls, directory: str | os.PathLike, key: dict, lengths: Sequence[int], embed_dim: int, dtype: str
    ) -> PrefixStore | None:
        """The store of `key` where it exists and lacks no example; else None, and nothing is made."""
        store, text = cls._named(directory, key, lengths, embed_dim, dtype)
        if not store._is_whole(text):
            return None
        store._map()
        if not store.missing():
            return store
        store.close()
        return None

    @classmethod
    def _named(cls, directory, key: dict, lengths: Sequence[int], embed_dim: int, dtype: str) -> tuple[PrefixStore, str]:
        index = {"key": key, "lengths": [int(n) for n in lengths], "embed_dim": embed_dim, "dtype": dtype}
        text = json.dumps(index, sort_keys=True)
        root = Path(directory).expanduser().resolve()
        return cls(root / hashlib.sha256(text.encode()).hexdigest()[:16], lengths, embed_dim, dtype), text

    def _map(self) -> None:
        self._done = np.memmap(self.path / "done", np.uint8, "r+", shape=(len(self._starts) - 1,))
        self._data = np.memmap(self.path / "states", self.dtype, "r", shape=(int(self._starts[-1]), self.embed_dim))
        self._file = os.open(self.path / "states", os.O_RDWR)

    def _reserve(self, text: str, root: Path, report: Callable[[str], None]) -> None:
        """Brings the files to full size before anything is computed; a store with a valid index is left as it is."""
        states, done, index = self.path / "states", self.path / "done", self.path / "index.json"
        if self._is_whole(text):
            report(f"prefix cache: {_amount(self.num_bytes)} in {self.path}")
            return
        index.unlink(missing_ok=True)
        others = [p for p in root.iterdir() if p != self.path and (p / "index.json").is_file()]
        old = sum((p / "states").stat().st_size for p in others if (p / "states").is_file())
        allocated = states.stat().st_blocks * 512 if states.exists() else 0
        free = shutil.disk_usage(self.path).free
        report(
            f"prefix cache: needs {_amount(self.num_bytes)} in {self.path}, {_amount(free)} are free"
            + (f"; {len(others)} other caches there hold {_amount(old)} and may be deleted" if others else "")
        )
        if self.num_bytes - allocated > free:
            raise UserError(
                f"prefix cache: {_amount(self.num_bytes)} are needed in {root} but only {_amount(free)} are free; "
                "free some space, choose another cache directory, use bfloat16, or turn the cache off"
            )
        with open(states, "ab") as file:
            file.truncate(self.num_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, self.num_bytes)  # a full disk shows here, not in the middle of the run
        done.write_bytes(bytes(len(self._starts) - 1))
        half = index.with_suffix(".part")
        half.write_text(text)
        os.replace(half, index)

    def _is_whole(self, text: str) -> bool:
        states, done, index = self.path / "states", self.path / "done", self.path / "index.json"
        return (
            index.is_file()
            and index.read_text() == text
            and states.is_file()
            and states.stat().st_size == self.num_bytes
            and done.is_file()
            and done.stat().st_size == len(self._starts) - 1
        )

    def missing(self) -> list[int]:
        """Indices of the examples whose states are not yet stored."""
        return np.flatnonzero(self._done == 0).tolist()

    def write(self, indices: Sequence[int], arrays: Sequence[np.ndarray]) -> None:
        """Stores one [T, D] array an index, cast to the store's type.

        The states reach the disk before the flags are set: an interruption loses examples but never leaves half of one.
        Raises ValueError for a wrong shape and UserError where the disk refuses.
        """
        try:
            for index, array in zip(indices, arrays, strict=True):
                start, stop = int(self._starts[index]), int(self._starts[index + 1])
                if array.shape != (stop - start, self.embed_dim):
                    raise ValueError(f"example {index} has states {array.shape}, expected {(stop - start, self.embed_dim)}")
                self._put(np.ascontiguousarray(array, self.dtype), start)
            os.fdatasync(self._file) if hasattr(os, "fdatasync") else os.fsync(self._file)
        except OSError as error:
            raise UserError(
                f"prefix cache: {error.strerror or error} while writing {self.path}; free the disk and start again"
            ) from error
        self._done[list(indices)] = 1
        self._done.flush()

    def _put(self, array: np.ndarray, start: int) -> None:
        data = memoryview(array.view(np.uint8).reshape(-1))
        offset = start * self.embed_dim * self.dtype.itemsize
        while data:
            count = os.pwrite(self._file, data, offset)
            data, offset = data[count:], offset + count

    def read(self, index: int) -> np.ndarray:
        """The [T, D] states of one example, in the store's type. Raises KeyError where they were not written."""
        if not self._done[index]:
            raise KeyError(f"example {index} is not in the prefix cache {self.path}")
        return np.asarray(self._data[int(self._starts[index]) : int(self._starts[index + 1])])

    def batch(self, rows: Sequence[Sequence[int]], length: int, left_pad: bool = False) -> np.ndarray:
        """[B, T, D] for rows of example indices, laid out as `pipeline.make_batch` does tokens; zeros in padding."""
        out = np.zeros((len(rows), length, self.embed_dim), self.dtype)
        for r, row in enumerate(rows):
            parts = [self.read(i) for i in row]
            at = length - sum(map(len, parts)) if left_pad else 0
            for part in parts:
                out[r, at : at + len(part)] = part
                at += len(part)
        return out

    def close(self) -> None:
        """Closes the file that `write` uses; `read` goes on working."""
        os.close(self._file)
