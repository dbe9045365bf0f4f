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
