"""Unequal sequences into few batch shapes: sorted by length within a window, padded to buckets, answered in input order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from calyrex_jax.backbones.spec import DecoderSpec, check_tokens
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Batch, bucket, slots
from calyrex_jax.sharding.mesh import AXES
from calyrex_jax.sharding.rules import batch_sharding

_SPAN = 64  # the narrowest span: attention onto a few more slots costs less than another compilation
_WINDOW = 16  # batches that are sorted together: lines come out at most this many batches after their turn


class Sequenced(Protocol):
    """What this room needs of a conversation: tokens int32 [T] and system bool [T], true on the caller's system text."""

    tokens: np.ndarray
    system: np.ndarray


def plan(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Rows of each batch: windows in input order, the longest first within one, so that memory runs out early or never.

    >>> list(plan([5, 90, 7, 80], 2))
    [[1, 3], [0, 2]]
    """
    window = batch_size * _WINDOW
    for start in range(0, len(lengths), window):
        rows = sorted(range(start, min(start + window, len(lengths))), key=lambda row: (-bucket(lengths[row]), row))
        yield from (rows[at : at + batch_size] for at in range(0, len(rows), batch_size))


def assemble(chosen: Sequence[Sequenced], batch_size: int, pad_id: int, left_pad: bool) -> Batch:
    """A numpy Batch of `batch_size` rows, one conversation each; rows beyond `chosen` are padding throughout."""
    length = bucket(max(len(c.tokens) for c in chosen))
    tokens = np.full((batch_size, length), pad_id, np.int32)
    positions, segments = np.zeros_like(tokens), np.zeros_like(tokens)
    system = np.zeros((batch_size, length), bool)
    for row, conversation in enumerate(chosen):
        size = len(conversation.tokens)
        at = slice(length - size, length) if left_pad else slice(0, size)
        tokens[row, at], system[row, at] = conversation.tokens, conversation.system
        positions[row, at], segments[row, at] = np.arange(size), 1
    width = int(system.sum(-1).max())
    span = slots(system, bucket(width, _SPAN) if width else 0)
    return Batch(tokens, positions, segments, system, np.zeros_like(system), span)


def rows_of(batch_size: int, count: int, mesh: Mesh | None) -> int:
    """Rows a batch: no more than there are conversations, and as many as divide over the mesh's data devices."""
    size = min(batch_size, count)
    devices = 1 if mesh is None else mesh.shape[AXES[0]] * mesh.shape[AXES[1]]
    return -(-size // devices) * devices


def place(tree, mesh: Mesh | None):
    """Row-wise arrays onto the mesh, rows over its data devices; as they are without a mesh."""
    return tree if mesh is None else jax.device_put(tree, batch_sharding(mesh))


def max_positions(spec: DecoderSpec) -> int:
    """How many positions the backbone was made for: its own limit, or what its rotary scaling extends it to."""
    if spec.rope is None:
        return spec.max_positions
    stretched = (spec.rope.original_positions or spec.max_positions) * spec.rope.factor
    return max(spec.max_positions, int(stretched))


def check(spec: DecoderSpec, conversations: Sequence[Sequenced], new_tokens: int, where: Sequence[str] | None) -> None:
    """Refuses, before anything is compiled, what jit would silently clamp: foreign token ids and too many positions.

    where  names each conversation in messages, such as "chats.jsonl:3"; by default its number from 1
    """
    limit = max_positions(spec)
    for index, conversation in enumerate(conversations):
        name = f"conversation {index + 1}" if where is None else where[index]
        size = len(conversation.tokens)
        if size == 0:
            raise UserError(f"{name}: no tokens; at least one is needed to go on from")
        check_tokens(spec, int(np.max(conversation.tokens)), name)
        check_tokens(spec, int(np.min(conversation.tokens)), name)
        if size + new_tokens > limit:
            extra = f" and {new_tokens} new ones" if new_tokens else ""
            remedy = "shorten it or lower config.generate.max_new_tokens" if new_tokens else "shorten it"
            raise UserError(f"{name}: {size} tokens{extra}, but the backbone has {limit} positions; {remedy}")
