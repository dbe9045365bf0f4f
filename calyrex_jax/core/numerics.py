"""The one matrix product that backbones and adapters share."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from calyrex_jax.core.types import Array


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Array, w: Array, contract: int = 1) -> jax.Array:
    """x [batch…, in…] times w [in…, out…] over the `contract` input axes, in x's type with float32 sums.

        matmul(x, w)            # [B, T, D] · [D, N, H] -> [B, T, N, H]
        matmul(y, w_o, 2)       # [B, T, N, H] · [N, H, D] -> [B, T, D]

    w may be wider than x (float32 parameters beside a bfloat16 stream): it is rounded for the product, and its gradient
    comes in its own type. All three products of a step, forward and backward, multiply in x's type and add in float32:
    XLA's CPU backend reaches the matrix units with bfloat16 in and float32 out alone (3.5 times float32's speed where
    the processor has them), and a bfloat16 sum of a thousand terms keeps two digits.
    """
    return _product(x, w.astype(x.dtype), (range(x.ndim - contract, x.ndim), range(contract))).astype(x.dtype)


def _product(a: Array, b: Array, axes) -> jax.Array:
    return jnp.tensordot(a, b, axes=tuple(map(tuple, axes)), preferred_element_type=jnp.float32)


def _forward(x: Array, w: Array, contract: int):
    return matmul(x, w, contract), (x, w)


def _backward(contract: int, saved, g: Array):
    x, w = saved
    rows = range(x.ndim - contract)
    outputs = range(len(rows), g.ndim)
    dx = _product(g, w.astype(x.dtype), (outputs, range(contract, w.ndim))).astype(x.dtype)
    dw = _product(x, g, (rows, rows)).astype(w.dtype)
    return dx, dw


matmul.defvjp(_forward, _backward)


def storage_type(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type of a buffer that is updated in place and holds `dtype`: uint16 for bfloat16 on CPUs, else the same.

    XLA's CPU backend has no bfloat16 slices and updates: it would convert the whole buffer to float32 and back for each.
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 and jax.default_backend() == "cpu" else dtype


def take_layer(stack: Array, layer: Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Entry `layer` of a stack [L, …] inside a scan over layers; `dtype` is what the stack holds, by default its own type."""
    dtype = stack.dtype if dtype is None else jnp.dtype(dtype)
    if stack.dtype != storage_type(dtype):
        stack = jax.lax.bitcast_convert_type(stack, storage_type(dtype))
    taken = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    return taken if taken.dtype == dtype else jax.lax.bitcast_convert_type(taken, dtype)


def put(buffer: Array, values: Array, start: tuple) -> jax.Array:
    """`buffer`, of `storage_type`, with `values` written at `start`; in place where the caller owns the buffer."""
    if buffer.dtype == jnp.uint16:
        values = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.dynamic_update_slice(buffer, values.astype(buffer.dtype), start)
