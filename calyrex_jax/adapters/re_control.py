"""RE-Control (Kong et al., arXiv 2406.05954): gradient steps on hidden states at test time, a steering baseline.

    s(x) = W2 GELU(W1 x / |x|·√D + b1) + b2          a value of one state; harmful where above 0
    x <- x - α |x| ∇s / |∇s|, n times, while s > 0    at boundary l* + 1

Every position is treated alike, the prompt's too, so that cached and whole sequences agree. The steps are relative to the
state's own length. Strength 0 changes nothing. `training.re_control` fits s to labelled replies.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array, Tree

_FLAT = 1e-12


@dataclass(frozen=True)
class ReControl:
    """One block; width is that of the value's hidden layer, steps n, strength α."""

    boundaries: tuple[int, ...]
    embed_dim: int
    width: int
    steps: int
    strength: float
    name: str = "re_control"

    def __post_init__(self):
        if self.steps < 1 or self.width < 1:
            raise UserError(f"config.re_control: width={self.width}, steps={self.steps}; both are at least 1")
        if self.strength < 0:
            raise UserError(f"config.re_control.strength: got {self.strength}, expected 0 (no change) or more")

    def init(self, key: jax.Array) -> Tree:
        """A value that calls nothing harmful: its output weights are zero."""
        w_in = jax.random.normal(key, (self.embed_dim, self.width), jnp.float32) * self.embed_dim**-0.5
        zeros = {"b_in": jnp.zeros(self.width), "w_out": jnp.zeros(self.width), "b_out": jnp.zeros(())}
        return {boundary_key(b): {"w_in": w_in} | zeros for b in self.boundaries}

    def apply(self, params: Tree, site: Site) -> jax.Array:
        if not self.strength:
            return site.x
        x = start = site.x.astype(jnp.float32)
        for _ in range(self.steps):
            score, pull = jax.vjp(lambda x: value(params, x), x)
            (slope,) = pull(jnp.ones_like(score))
            size = jnp.square(slope).sum(-1, keepdims=True)
            moves = (score > 0)[..., None] & (size > _FLAT)
            length = jnp.linalg.norm(x, axis=-1, keepdims=True)
            step = self.strength * length * slope / jnp.sqrt(jnp.where(moves, size, 1.0))
            x = x - jnp.where(moves, step, 0.0)
        return jnp.where(x == start, site.x, x.astype(site.x.dtype))

    def prefill(self, params: Tree, site: Site, capacity: int) -> tuple[jax.Array, Tree]:
        return self.apply(params, site), {}

    def decode(self, params: Tree, site: Site, state: Tree) -> tuple[jax.Array, Tree]:
        return self.apply(params, site), state


def value(params: Tree, x: Array) -> jax.Array:
    """s of states [..., D] float32: [...]; blind to their length, which varies a hundredfold between positions."""
    length = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + _FLAT)
    hidden = jax.nn.gelu((x / length) @ params["w_in"] + params["b_in"], approximate=False)
    return hidden @ params["w_out"] + params["b_out"]
