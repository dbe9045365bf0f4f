"""ParallelMLP: CAL's control without attention, a SwiGLU at the same boundaries (baseline of CALYREX, arXiv 2605.09737).

    X' = X + SwiGLU(RMSNorm(X)) W_D

W_D is zero at initialisation, so X' equals X exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import matmul
from calyrex_jax.core.types import Array, Tree


@dataclass(frozen=True)
class ParallelMlpConfig:
    """What a block is made of.

    gate_by_span  a position that sees no span position passes unchanged, as in CAL: without a system prompt no change
    """

    embed_dim: int
    mlp_dim: int
    norm_eps: float
    gate_by_span: bool = False

    def __post_init__(self):
        if self.mlp_dim < 1:
            raise UserError(f"parallel_mlp.mlp_dim: {self.mlp_dim} leaves no mlp; use at least 1, or 0 to match CAL's size")


def matched_width(budget: int, blocks: int, embed_dim: int) -> int:
    """The mlp_dim at which `blocks` blocks have `budget` parameters, to within 1 %.

        >>> matched_width(5 * 1_328_256, 5, 576)
        768

    It is a multiple of the largest power of two up to 128 that keeps it within half a percent, so that it divides over
    a mesh. Raises UserError where no width comes within 1 %.
    """
    exact = (budget / blocks / embed_dim - 1) / 3

    def miss(width: int) -> float:
        return abs(blocks * (3 * width + 1) * embed_dim / budget - 1)

    for multiple in (128, 64, 32, 16, 8, 4, 2):
        width = round(exact / multiple) * multiple
        if width and miss(width) <= 0.005:
            return width
    width = max(round(exact), 1)
    if miss(width) > 0.01:
        raise UserError(
            f"parallel_mlp.mlp_dim: no width gives CAL's {budget:,} parameters within 1 % ({width} misses by "
            f"{miss(width):.1%}); set config.parallel_mlp.mlp_dim"
        )
    return width


class ParallelMlpBlock(nn.Module):
    """One block; parameters in float32, arithmetic in the stream's type."""

    config: ParallelMlpConfig

    @nn.compact
    def __call__(self, x: Array) -> jax.Array:
        d, f = self.config.embed_dim, self.config.mlp_dim
        fan_in = nn.initializers.lecun_normal()
        scale = self.param("mlp_norm", nn.initializers.ones, (d,))
        w_gate, w_up = self.param("w_gate", fan_in, (d, f)), self.param("w_up", fan_in, (d, f))
        w_down = self.param("w_down", nn.initializers.zeros, (f, d))
        # float32: the mean of squares of a bfloat16 stream loses three decimal digits
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        normed = (wide * scale).astype(x.dtype)
        # float32 between the maps: on CPUs an activation of bfloat16 numbers takes twice as long
        inner = jax.nn.silu(matmul(normed, w_gate).astype(jnp.float32)) * matmul(normed, w_up)
        return x + matmul(inner.astype(x.dtype), w_down)


@dataclass(frozen=True)
class ParallelMlp:
    """The ParallelMLP adapter: a block at every boundary of a placement."""

    config: ParallelMlpConfig
    boundaries: tuple[int, ...]
    name: str = "parallel_mlp"

    def init(self, key: jax.Array) -> Tree:
        block = ParallelMlpBlock(self.config)
        # jitted: linen's init runs the block once, which op by op would compile dozens of programs
        init = jax.jit(lambda key: block.init(key, jnp.zeros((1, 1, self.config.embed_dim)))["params"])
        keys = jax.random.split(key, len(self.boundaries))
        return {boundary_key(b): init(k) for b, k in zip(self.boundaries, keys)}

    def apply(self, params: Tree, site: Site) -> jax.Array:
        if not self.config.gate_by_span:
            return self._block(params, site.x)
        origin = jnp.take_along_axis(site.segments, jnp.maximum(site.span, 0), axis=1)
        here = jnp.arange(site.x.shape[1])[None, :, None]
        seen = (site.span >= 0)[:, None, :] & (site.span[:, None, :] <= here)
        return self._gated(params, site.x, (seen & (origin[:, None, :] == site.segments[:, :, None])).any(-1))

    def prefill(self, params: Tree, site: Site, capacity: int) -> tuple[jax.Array, Tree]:
        if not self.config.gate_by_span:
            return self._block(params, site.x), {}
        # a whole prompt's span lies before every token that follows it
        return self.apply(params, site), {"sees_span": (site.span >= 0).any(-1)}

    def decode(self, params: Tree, site: Site, state: Tree) -> tuple[jax.Array, Tree]:
        if not self.config.gate_by_span:
            return self._block(params, site.x), state
        return self._gated(params, site.x, state["sees_span"][:, None]), state

    def _block(self, params: Tree, x: Array) -> jax.Array:
        return ParallelMlpBlock(self.config).apply({"params": params}, x)

    def _gated(self, params: Tree, x: Array, sees_span: Array) -> jax.Array:
        """sees_span [B, T]."""
        return jnp.where(sees_span[..., None], self._block(params, x), x)
