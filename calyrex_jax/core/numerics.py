"""Matrix products, attention and buffers that backbones and adapters share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from calyrex_jax.core.types import Array

MASKED = -1e30  # finite: -inf minus -inf would be NaN in a row without any key


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


def attend(q: Array, k: Array, v: Array, mask: Array) -> jax.Array:
    """Softmax attention: q [B, T, N, H] already scaled, k and v [B, S, K, H], mask [B, T, S] bool -> [B, T, N, H].

    Scores and softmax are float32: with 8 bits of mantissa, large scores lose their order. A query that sees no key gets
    an exact zero, not the mean of what is masked, and its gradients are zero too.
    """
    return _weighted(*_softmax_parts(q, k, mask), v)


def attend_pointing(q: Array, k: Array, v: Array, gates: Array, mask: Array) -> tuple[jax.Array, jax.Array]:
    """`attend`, and what its heads look at, summed over them with the weights gates [B, T, N]: [B, T, S] float32."""
    weights, total = _softmax_parts(q, k, mask)
    gates = gates.reshape(*gates.shape[:2], *weights.shape[1:3]).transpose(0, 2, 3, 1)
    return _weighted(weights, total, v), jnp.einsum("bkgts,bkgt->bts", weights, gates / total[..., 0])


def attention_weights(q: Array, k: Array, mask: Array) -> jax.Array:
    """What `attend` weights values with: [B, N, T, S] float32, zeros where a query sees no key."""
    weights, total = _softmax_parts(q, k, mask)
    return (weights / total).reshape(weights.shape[0], -1, *weights.shape[3:])


def _weighted(weights: Array, total: Array, v: Array) -> jax.Array:
    """The mean of v [B, S, K, H] by numerators and denominators as `_softmax_parts` gives them: [B, T, N, H]."""
    b, k, g, t, s = weights.shape
    rows = weights.astype(v.dtype).reshape(b, k, g * t, s)
    out = jnp.einsum("bkqs,bksh->bkqh", rows, v.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32)
    out = out.reshape(b, k, g, t, -1) / total
    return out.transpose(0, 3, 1, 2, 4).reshape(b, t, k * g, -1).astype(v.dtype)


def _softmax_parts(q: Array, k: Array, mask: Array) -> tuple[Array, Array]:
    """A softmax's numerators [B, K, G, T, S] and denominators [B, K, G, T, 1], float32; all 0 over 0.5 where no key is seen."""
    b, t, n, h = q.shape
    heads, groups = k.shape[2], n // k.shape[2]
    # the queries of a group are rows of one matrix product, and heads lead: a fifth faster on CPUs than one einsum
    q = q.reshape(b, t, heads, groups, h).transpose(0, 2, 3, 1, 4).reshape(b, heads, groups * t, h)
    scores = jnp.einsum("bkqh,bksh->bkqs", q, k.transpose(0, 2, 1, 3), preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores.reshape(b, heads, groups, t, -1), MASKED)
    # MASKED lies so far below this bound that exp gives an exact zero, also where a row has nothing but MASKED
    top = jnp.maximum(jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)), MASKED / 10)
    weights = jnp.exp(scores - top)
    # the sum is at least 1 where any key is seen, else 0
    return weights, jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 0.5)


def settle(x: Array) -> jax.Array:
    """x, with the rounding to its own type really done.

    XLA may drop a rounding to bfloat16 that a conversion back follows, and does so or not by what it compiles together;
    with this at every layer's end, a backbone cut into segments gives the same bits as one that is run whole.
    """
    if x.dtype != jnp.bfloat16:
        return x
    return jax.lax.reduce_precision(x.astype(jnp.float32), exponent_bits=8, mantissa_bits=7).astype(x.dtype)


_compiled_for: list[str] = []


def platform() -> str:
    """What programs are traced for: the default backend, or inside `compiling_for` another."""
    return _compiled_for[-1] if _compiled_for else jax.default_backend()


@contextlib.contextmanager
def compiling_for(name: str) -> Iterator[None]:
    """Programs traced inside are those of platform `name` ("tpu"), which this machine need not have."""
    differs = name != platform()
    if differs:
        jax.clear_caches()  # traces do not know what they were made for
    _compiled_for.append(name)
    try:
        yield
    finally:
        _compiled_for.pop()
        if differs:
            jax.clear_caches()


def storage_type(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The type of a buffer that is updated in place and holds `dtype`: uint16 for bfloat16 on CPUs, else the same.

    XLA's CPU backend has no bfloat16 slices and updates: it would convert the whole buffer to float32 and back for each.
    """
    dtype = jnp.dtype(dtype)
    return jnp.dtype(jnp.uint16) if dtype == jnp.bfloat16 and platform() == "cpu" else dtype


def stored(array: Array) -> Array:
    """An array in its `storage_type`, bit for bit; `take_layer` reads either."""
    return _bits(array) if storage_type(array.dtype) != array.dtype else array


@jax.jit
def _bits(array: Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(array, jnp.uint16)


def take_layer(stack: Array, layer: Array | int, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Entry `layer` of a stack [L, …] inside a scan over layers. The stack may be `stored`; `dtype` is what it holds, by
    default its own type, and bfloat16 where it has 16-bit integers.
    """
    dtype = jnp.dtype(dtype or (jnp.bfloat16 if stack.dtype == jnp.uint16 else stack.dtype))
    if stack.dtype != storage_type(dtype):
        stack = jax.lax.bitcast_convert_type(stack, storage_type(dtype))
    taken = jax.lax.dynamic_index_in_dim(stack, layer, keepdims=False)
    return taken if taken.dtype == dtype else jax.lax.bitcast_convert_type(taken, dtype)


def put(buffer: Array, values: Array, start: tuple) -> jax.Array:
    """`buffer`, of `storage_type`, with `values` written at `start`; in place where the caller owns the buffer."""
    if buffer.dtype == jnp.uint16:
        values = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return jax.lax.dynamic_update_slice(buffer, values.astype(buffer.dtype), start)
