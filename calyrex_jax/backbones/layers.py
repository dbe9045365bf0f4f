"""Linear maps, norms and the mlp: what a decoder layer is made of beside attention."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.lowrank import LayerDeltas
from calyrex_jax.core.numerics import matmul

_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}
_WEIGHT = nn.initializers.normal(0.02)


def linear(
    name: str, x: jax.Array, w: jax.Array, b: jax.Array | None = None, contract: int = 1, deltas: LayerDeltas | None = None
) -> jax.Array:
    """x [B, T, in…] times w [in…, out…], plus b [out…]: every linear map of a layer passes here, under its `name`.

    contract is the number of input dimensions: 2 for `attn/w_o`, whose input is [B, T, N, H]. deltas may add to the product.
    """
    if w.ndim <= contract:
        raise ValueError(f"{name} has shape {w.shape}; expected more than {contract} dimensions")
    y = matmul(x, w, contract)
    added = None if deltas is None else deltas.added(name, x, contract)
    if added is not None:
        y = (y.astype(jnp.float32) + added).astype(x.dtype)
    return y if b is None else y + b


def norm(spec: DecoderSpec, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """RMS or layer norm over the last axis; in float32, since a bfloat16 sum of D squares loses most of its digits."""
    wide = x.astype(jnp.float32)
    if spec.norm == "layer":
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + spec.norm_eps)
    wide = wide * scale.astype(jnp.float32)
    return (wide if bias is None else wide + bias.astype(jnp.float32)).astype(x.dtype)


class Norm(nn.Module):
    """`norm` with its parameters `scale` [D] and, for layer norms, `bias` [D]."""

    spec: DecoderSpec

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = (self.spec.embed_dim,)
        scale = self.param("scale", nn.initializers.ones, width, x.dtype)
        bias = self.param("bias", nn.initializers.zeros, width, x.dtype) if self.spec.norm == "layer" else None
        return norm(self.spec, x, scale, bias)


class Mlp(nn.Module):
    """w_down(act(w_gate x) * w_up x) where gated, w_down(act(w_up x)) otherwise: [B, T, D] -> [B, T, D]."""

    spec: DecoderSpec

    def _linear(self, name: str, x: jax.Array, shape: tuple[int, int], deltas: LayerDeltas | None) -> jax.Array:
        w = self.param(f"w_{name}", _WEIGHT, shape, x.dtype)
        b = self.param(f"b_{name}", _WEIGHT, shape[1:], x.dtype) if self.spec.mlp_bias else None
        return linear(f"mlp/w_{name}", x, w, b, deltas=deltas)

    @nn.compact
    def __call__(self, x: jax.Array, deltas: LayerDeltas | None = None) -> jax.Array:
        spec = self.spec
        wide, act = (spec.embed_dim, spec.mlp_dim), _ACTIVATIONS[spec.activation]
        # float32 between the maps: on CPUs an activation of bfloat16 numbers takes twice as long
        inner = act(self._linear("gate" if spec.gated else "up", x, wide, deltas).astype(jnp.float32))
        if spec.gated:
            inner = inner * self._linear("up", x, wide, deltas)
        return self._linear("down", inner.astype(x.dtype), wide[::-1], deltas)
