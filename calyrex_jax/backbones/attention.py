"""Grouped-query attention with segments, windows, rotary phases and a cache."""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import linen as nn

from calyrex_jax.backbones.layers import _WEIGHT, linear
from calyrex_jax.backbones.rope import rotate
from calyrex_jax.backbones.spec import DecoderSpec

MASKED = -1e30  # finite: -inf minus -inf would be NaN in a row without any key
_MAX_CHUNK = 1024  # queries at once
_MIN_CHUNK = 128
_CHUNK_SCORES = 1024 * 4096  # scores a head and row at once, so that long prompts do not need T * T of them


@flax.struct.dataclass
class Context:
    """What all layers of one forward share.

    positions, segments  [B, T] int32 of the tokens at hand
    cos, sin             [B, T, H/2] float32, or None with learned positions
    """

    positions: jax.Array
    segments: jax.Array
    cos: jax.Array | None = None
    sin: jax.Array | None = None


def visible(
    q_positions: jax.Array,
    q_segments: jax.Array,
    k_positions: jax.Array,
    k_segments: jax.Array,
    window: jax.Array | int | None,
) -> jax.Array:
    """[B, T, S] bool: same segment, not padding, not later than the query, and within its window of latest positions."""
    q_positions, q_segments = q_positions[:, :, None], q_segments[:, :, None]
    k_positions, k_segments = k_positions[:, None, :], k_segments[:, None, :]
    mask = (q_segments == k_segments) & (q_segments != 0) & (k_positions <= q_positions)
    return mask if window is None else mask & (q_positions - k_positions < window)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax attention: q [B, T, N, H] already scaled, k and v [B, S, K, H], mask [B, T, S] bool -> [B, T, N, H].

    Scores and softmax are float32: with 8 bits of mantissa, large scores lose their order. A query that sees no key gets
    an exact zero, not the mean of what is masked, and its gradients are zero too.
    """
    b, t, n, h = q.shape
    groups = n // k.shape[2]
    q = q.reshape(b, t, k.shape[2], groups, h)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=jnp.float32)
    mask = mask[:, None, None]
    scores = jnp.where(mask, scores, MASKED)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1)  # at least 1 where any key is seen, else 0
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    out = out / jnp.maximum(total, 0.5).transpose(0, 3, 1, 2)[..., None]
    return out.reshape(b, t, n, h).astype(v.dtype)


def chunk_size(queries: int, keys: int) -> int:
    """How many of `queries` are processed at once: all of a short sequence, at least 128 of a long one."""
    limit = min(_MAX_CHUNK, max(_MIN_CHUNK, _CHUNK_SCORES // keys))
    return -(-queries // -(-queries // limit))


def attend_in_chunks(
    q: jax.Array, k: jax.Array, v: jax.Array, mask_of: Callable[[jax.Array, jax.Array], jax.Array], context: Context
) -> jax.Array:
    """`attend` over chunks of queries; mask_of(positions, segments) gives the mask of some of them."""
    b, t = q.shape[:2]
    size = chunk_size(t, k.shape[1])
    if size == t:
        return attend(q, k, v, mask_of(context.positions, context.segments))
    count = -(-t // size)

    def split(array: jax.Array) -> jax.Array:
        # queries added to fill the last chunk have segment 0, see nothing and are cut off again
        array = jnp.pad(array, ((0, 0), (0, count * size - t)) + ((0, 0),) * (array.ndim - 2))
        return array.reshape(b, count, size, *array.shape[2:]).swapaxes(0, 1)

    # recomputing a chunk's scores in the backward pass keeps them, too, from existing all at once
    @jax.checkpoint
    def one(chunk):
        queries, positions, segments = chunk
        return attend(queries, k, v, mask_of(positions, segments))

    out = jax.lax.map(one, (split(q), split(context.positions), split(context.segments)))
    return out.swapaxes(0, 1).reshape(b, count * size, *q.shape[2:])[:, :t]


class Attention(nn.Module):
    """Self-attention of one layer: [B, T, D] -> [B, T, D]."""

    spec: DecoderSpec

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, layer: jax.Array | int, attention: Callable) -> tuple:
        """attention(q, k, v) -> (out, state) decides which keys are seen; its state is handed through."""
        spec = self.spec
        heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
        made = {}
        for name, count in heads.items():
            shape = (spec.embed_dim, count, spec.head_dim)
            w = self.param(f"w_{name}", _WEIGHT, shape, x.dtype)
            b = self.param(f"b_{name}", _WEIGHT, shape[1:], x.dtype) if spec.qkv_bias else None
            made[name] = linear(f"attn/w_{name}", x, w, b)
        q, k = made["q"].astype(jnp.float32), made["k"]
        if context.cos is not None:
            q, k = rotate(q, context.cos, context.sin), rotate(k, context.cos, context.sin)
        scale = spec.scale / (layer + 1.0) if spec.inverse_layer_scale else spec.scale
        # the scale is applied to q, which is smaller than the scores, before its only rounding
        out, state = attention((q * scale).astype(x.dtype), k.astype(x.dtype), made["v"])
        w_o = self.param("w_o", _WEIGHT, (spec.num_heads, spec.head_dim, spec.embed_dim), x.dtype)
        b_o = self.param("b_o", _WEIGHT, (spec.embed_dim,), x.dtype) if spec.out_bias else None
        return linear("attn/w_o", out, w_o, b_o, contract=2), state
