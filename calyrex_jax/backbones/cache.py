"""The key/value cache of generation: all layers in one buffer, one slot a token, the same slot in every row."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp

from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import storage_type


@flax.struct.dataclass
class Cache:
    """Keys and values of the tokens so far.

    k, v       [L, B, C, K, H] in `numerics.storage_type`; rotated keys
    positions  [B, C] int32
    segments   [B, C] int32; 0 marks an empty slot or padding
    start      int32 scalar: the slot where the tokens of the present step are written
    length     int32 scalar: the slots in use after it; the same for all rows, since prompts are padded on the left
    aside      int32 scalar or None: where given, all tokens of the present step but the last are written from that slot on
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    segments: jax.Array
    start: jax.Array
    length: jax.Array
    aside: jax.Array | None = None


def init_cache(spec: DecoderSpec, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Cache:
    """An empty cache for `batch` rows of `capacity` slots."""
    shape = (spec.num_layers, batch, capacity, spec.num_kv_heads, spec.head_dim)
    slots = jnp.zeros((batch, capacity), jnp.int32)
    dtype = storage_type(dtype)
    # two buffers, so that a caller may donate the cache
    return Cache(
        k=jnp.zeros(shape, dtype),
        v=jnp.zeros(shape, dtype),
        positions=slots,
        segments=jnp.zeros_like(slots),
        start=jnp.zeros((), jnp.int32),
        length=jnp.zeros((), jnp.int32),
    )


def extend(cache: Cache, positions: jax.Array, segments: jax.Array) -> Cache:
    """Takes the next T slots for tokens at `positions` with `segments`, [B, T] int32 each; once a step, before run_layers.

    A write beyond the capacity would silently land on the last slots: `check_capacity` first, on the host.
    """
    start = cache.length
    return cache.replace(
        positions=jax.lax.dynamic_update_slice(cache.positions, positions.astype(jnp.int32), (0, start)),
        segments=jax.lax.dynamic_update_slice(cache.segments, segments.astype(jnp.int32), (0, start)),
        start=start,
        length=start + positions.shape[1],
    )


def check_capacity(capacity: int, needed: int, what: str) -> None:
    """UserError where prompt, bridge and new tokens together need more slots than the cache has."""
    if needed > capacity:
        raise UserError(f"{what}: needs {needed} cache slots but only {capacity} were set aside; shorten it or allow more")
