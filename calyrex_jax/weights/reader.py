"""What every kind of weight file offers: tensors by name, read a few rows at a time."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from calyrex_jax.core.errors import UserError


class TensorInfo(NamedTuple):
    """Shape (outermost axis first) and the name of the storage type: "float32", "bfloat16", "Q4_1", …"""

    shape: tuple[int, ...]
    dtype: str


class Reader(Protocol):
    """Named tensors in one or several files."""

    def names(self) -> dict[str, TensorInfo]:
        """Every tensor that the files hold."""

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the outermost axis as floating point; any number of threads may call it."""


def read_bytes(path: Path, offset: int, count: int) -> np.ndarray:
    """`count` bytes from `offset` on, [count] uint8.

    A plain read instead of a memory map: pages of a map stay in the resident set until it is closed, so that the whole
    file would count towards this process's memory. Opening anew lets threads read at the same time.
    """
    out = np.empty(count, np.uint8)
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < count:
                got = file.readinto(memoryview(out)[filled:])
                if not got:
                    raise UserError(
                        f"{path}: ends at byte {offset + filled} within a tensor; the file was cut; fetch it again"
                    )
                filled += got
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path and its permissions") from None
    return out
