"""Grouped-query attention with segments, windows, rotary phases and a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from calyrex_jax.backbones.layers import _WEIGHT, linear
from calyrex_jax.backbones.rope import rotate
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.lowrank import LayerDeltas
from calyrex_jax.core.numerics import attend

_MAX_CHUNK = 1024  # queries at once
_MIN_CHUNK = 128
_PIECES, _MIN_PIECE = 4, 64
_CHUNK_SCORES = 1024 * 4096  # scores a head and row at once, so that long prompts do not need T * T of them


class Tokens(NamedTuple):
    """Where tokens stand, [B, T] int32 each.

    positions, segments  segment 0 is padding or an empty slot
    version, sees        None, or: a key with a version above 0 is seen only by queries whose `sees` equals it
    """

    positions: jax.Array
    segments: jax.Array
    version: jax.Array | None = None
    sees: jax.Array | None = None

    def part(self, low: int, high: int) -> Tokens:
        """Slots low … high - 1."""
        return jax.tree.map(lambda array: array[:, low:high], self)


@flax.struct.dataclass
class Context:
    """What all layers of one forward share.

    positions, segments  [B, T] int32 of the tokens at hand
    cos, sin             [B, T, H/2] float32, or None with learned positions
    version, sees        [B, T] int32 or None: `Tokens`
    gaps                 whether positions may leave numbers out within a segment
    """

    positions: jax.Array
    segments: jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    version: jax.Array | None = None
    sees: jax.Array | None = None
    gaps: bool = flax.struct.field(pytree_node=False, default=False)


def visible(queries: Tokens, keys: Tokens, window: jax.Array | int | None) -> jax.Array:
    """[B, T, S] bool: same segment, not padding, not later than the query, and within its window of latest positions."""
    q_positions, q_segments = queries.positions[:, :, None], queries.segments[:, :, None]
    k_positions, k_segments = keys.positions[:, None, :], keys.segments[:, None, :]
    mask = (q_segments == k_segments) & (q_segments != 0) & (k_positions <= q_positions)
    if keys.version is not None and queries.sees is not None:
        version = keys.version[:, None, :]
        mask &= (version == 0) | (version == queries.sees[:, :, None])
    return mask if window is None else mask & (q_positions - k_positions < window)


def attend_tokens(
    q: jax.Array, k: jax.Array, v: jax.Array, queries: Tokens, keys: Tokens, window: jax.Array | int | None, ordered: bool
) -> jax.Array:
    """`attend` with the mask that positions and segments imply, without T * S scores at once.

    ordered says that queries and keys are the same tokens, so that no key in a later slot is seen: the queries are taken
    in pieces, each with the keys up to its end, which saves three eighths of the scores.
    """
    t = q.shape[1]
    pieces = min(_PIECES, max(1, t // _MIN_PIECE)) if ordered else 1
    size = -(-t // pieces)
    out = []
    for low in range(0, t, size):
        high = min(low + size, t)
        stop = high if ordered else k.shape[1]
        part = queries.part(low, high)
        out.append(_attend_in_chunks(q[:, low:high], k[:, :stop], v[:, :stop], part, keys.part(0, stop), window))
    return out[0] if len(out) == 1 else jnp.concatenate(out, axis=1)


def chunk_size(queries: int, keys: int) -> int:
    """How many of `queries` are processed at once: all of a short sequence, at least 128 of a long one."""
    limit = min(_MAX_CHUNK, max(_MIN_CHUNK, _CHUNK_SCORES // keys))
    return -(-queries // -(-queries // limit))


def _attend_in_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, queries: Tokens, keys: Tokens, window: jax.Array | int | None
) -> jax.Array:
    b, t = q.shape[:2]
    size = chunk_size(t, k.shape[1])
    if size == t:
        return attend(q, k, v, visible(queries, keys, window))
    count = -(-t // size)

    def split(array: jax.Array) -> jax.Array:
        # queries added to fill the last chunk have segment 0, see nothing and are cut off again
        array = jnp.pad(array, ((0, 0), (0, count * size - t)) + ((0, 0),) * (array.ndim - 2))
        return array.reshape(b, count, size, *array.shape[2:]).swapaxes(0, 1)

    # recomputing a chunk's scores in the backward pass keeps them, too, from existing all at once
    @jax.checkpoint
    def one(chunk: tuple[jax.Array, Tokens]) -> jax.Array:
        return attend(chunk[0], k, v, visible(chunk[1], keys, window))

    out = jax.lax.map(one, (split(q), jax.tree.map(split, queries)))
    return out.swapaxes(0, 1).reshape(b, count * size, *q.shape[2:])[:, :t]


class Attention(nn.Module):
    """Self-attention of one layer: [B, T, D] -> [B, T, D]."""

    spec: DecoderSpec

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        context: Context,
        layer: jax.Array | int,
        attention: Callable,
        deltas: LayerDeltas | None = None,
    ) -> tuple:
        """attention(q, k, v) -> (out, state) decides which keys are seen; its state is handed through."""
        spec = self.spec
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        made = {}
        for name, count in heads.items():
            shape = (spec.embed_dim, count, spec.head_dim)
            w = self.param(f"w_{name}", _WEIGHT, shape, x.dtype)
            b = self.param(f"b_{name}", _WEIGHT, shape[1:], x.dtype) if spec.qkv_bias else None
            made[name] = linear(f"attn/w_{name}", x, w, b, deltas=deltas)
        q, k = made["q"].astype(jnp.float32), made["k"]
        if context.cos is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        scale = spec.scale / (layer + 1.0) if spec.inverse_layer_scale else spec.scale
        # the scale is applied to q, which is smaller than the scores, before its only rounding
        out, state = attention((q * scale).astype(x.dtype), k.astype(x.dtype), made["v"])
        w_o = self.param("w_o", _WEIGHT, (spec.num_heads, spec.head_dim, spec.embed_dim), x.dtype)
        b_o = self.param("b_o", _WEIGHT, (spec.embed_dim,), x.dtype) if spec.out_bias else None
        return linear("attn/w_o", out, w_o, b_o, 2, deltas), state
