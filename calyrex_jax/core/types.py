"""The batch: the one shape of data that backbones, adapters, losses and generation share.

Axis legend, used throughout: B batch, T sequence positions, S system-span slots, M target slots, D model width,
N query heads, K key/value heads, G = N // K queries a key/value head, H head width, F mlp width, V vocabulary, L layers,
C cache slots.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import numpy as np

Array = jax.Array | np.ndarray
Tree = Any  # a nested dictionary whose leaves are arrays


@flax.struct.dataclass
class Batch:
    """Rows of one or more packed conversations, all of static shape.

    tokens     [B, T] int32; any id where `segments` is 0
    positions  [B, T] int32, from 0 and restarting at every segment; 0 in padding
    segments   [B, T] int32, 1, 2, … a packed conversation; 0 marks padding, on either side
    system     [B, T] bool, true where a token belongs to the caller's system text
    targets    [B, T] bool, true where token t is to be predicted (from the state at t - 1)
    span       [B, S] int32, the row's positions t at which `system` is true, in order; -1 fills unused slots.
               S = 0 where no row of the batch has a system text.
    target_slots  [B, M] int32 or None: the row's positions t at which `targets` is true, -1 fills; lets the output head
               run on targets alone
    prefix     [B, T, D] or None: the backbone's hidden states at the first adapter boundary, from the prefix cache
    distill    [B, T] bool or None: targets whose loss is the divergence from the frozen model's own prediction
    """

    tokens: Array
    positions: Array
    segments: Array
    system: Array
    targets: Array
    span: Array
    target_slots: Array | None = None
    prefix: Array | None = None
    distill: Array | None = None


def bucket(length: int, smallest: int = 32) -> int:
    """The padded length for `length`: `smallest` times 1, 2, 3, 4, 6, 8, 12, 16, …

    At most a third of a bucket is padding, and a corpus needs few compilations.

        >>> [bucket(n) for n in (1, 33, 70, 100, 150, 1000)]
        [32, 64, 96, 128, 192, 1024]
    """
    size = smallest
    while size < length:
        if size * 3 // 2 >= length and size > smallest:
            return size * 3 // 2
        size *= 2
    return size


def slots(mask: np.ndarray, width: int) -> np.ndarray:
    """Positions of the true entries of each row, padded with -1 to `width`: [B, T] bool -> [B, width] int32.

        >>> slots(np.array([[False, True, True]]), 4)
        array([[ 1,  2, -1, -1]], dtype=int32)

    Raises ValueError where a row has more than `width` true entries: nothing is ever cut.
    """
    out = np.full((mask.shape[0], width), -1, np.int32)
    for row, line in enumerate(mask):
        where = np.flatnonzero(line)
        if len(where) > width:
            raise ValueError(f"row {row} has {len(where)} marked positions but only {width} slots")
        out[row, : len(where)] = where
    return out
