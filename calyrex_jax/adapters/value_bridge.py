"""The latent value bridge of SVGT (arXiv 2605.11712): K tokens that carry a correction back into the backbone.

C = [h_v ; φ(Δz)]                        h_v: the trigger's hidden state, φ: Linear Z -> D, GELU, Linear D -> D
B_raw = MHA(q = K learned seeds, k = v = C)
B = LN(1_K h_v + softplus(a) B_raw)      a = -2 at the start
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.value_layers import Attention, LayerNorm, gelu
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array, Tree


@dataclass(frozen=True)
class BridgeConfig:
    """num_tokens is K, embed_dim the backbone's D, value_dim Z; num_heads are those of the attention that writes the tokens."""

    embed_dim: int
    value_dim: int
    num_tokens: int
    num_heads: int

    def __post_init__(self):
        if self.num_tokens < 1:
            raise UserError(
                f"config.svgt.num_bridge_tokens: got {self.num_tokens}, expected at least 1; published are 5 and 7"
            )
        if self.num_heads < 1 or self.embed_dim % self.num_heads:
            raise UserError(
                f"config.svgt.num_bridge_heads: {self.num_heads} heads do not divide the backbone's width {self.embed_dim}; "
                "choose a divisor"
            )


class BridgeModule(nn.Module):
    """All parameters of the bridge."""

    config: BridgeConfig

    def setup(self):
        c = self.config
        self.lift_hidden, self.lift_out = nn.Dense(c.embed_dim), nn.Dense(c.embed_dim)
        self.seeds = self.param("seeds", nn.initializers.normal(0.02), (c.num_tokens, c.embed_dim))
        self.attn = Attention(c.embed_dim, c.num_heads)
        self.strength = self.param("strength", nn.initializers.constant(-2.0), ())
        self.norm = LayerNorm()

    def __call__(self, h_v: Array, dz: Array) -> Array:
        """h_v [B, D], dz [B, Z] -> [B, K, D]."""
        h_v = h_v.astype(jnp.float32)
        context = jnp.stack([h_v, self.lift_out(gelu(self.lift_hidden(dz)))], axis=1)
        seeds = jnp.broadcast_to(self.seeds, (h_v.shape[0], *self.seeds.shape))
        everything = jnp.ones((h_v.shape[0], self.config.num_tokens, 2), bool)
        raw = self.attn(seeds, *self.attn.keys_values(context), everything)
        return self.norm(h_v[:, None] + jax.nn.softplus(self.strength) * raw)


@dataclass(frozen=True)
class Bridge:
    """The bridge of one backbone; everything is computed in float32."""

    config: BridgeConfig

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters, float32."""
        c = self.config
        arguments = (jnp.zeros((1, c.embed_dim)), jnp.zeros((1, c.value_dim)))
        # jitted: linen's init runs the module once, which op by op would compile dozens of programs
        return jax.jit(lambda key: BridgeModule(c).init(key, *arguments)["params"])(key)

    def propose(self, params: Tree, h_v: Array, dz: Array) -> Array:
        """The tokens B [B, K, D] float32 for triggers h_v [B, D] and corrections dz [B, Z]."""
        with jax.default_matmul_precision("highest"):
            return BridgeModule(self.config).apply({"params": params}, h_v, dz)

    def gate(self, params: Tree) -> Array:
        """softplus(a), a scalar: how much of B_raw the tokens carry."""
        return jax.nn.softplus(params["strength"])


@dataclass(frozen=True)
class InjectionConfig:
    """SVGT-Inject, the bridge's control: the correction, lifted to the backbone's width, is added to the stream at l*.

    strength  a factor on what is added; 0 changes nothing
    """

    embed_dim: int
    value_dim: int
    strength: float = 1.0

    def __post_init__(self):
        if self.strength < 0:
            raise UserError(f"config.svgt.strength: got {self.strength}, expected 0 (no change) or more")


class InjectionModule(nn.Module):
    """φ without biases, so that no correction adds exactly nothing."""

    config: InjectionConfig

    @nn.compact
    def __call__(self, dz: Array) -> Array:
        hidden = gelu(nn.Dense(self.config.embed_dim, use_bias=False, name="lift_hidden")(dz))
        return nn.Dense(self.config.embed_dim, use_bias=False, name="lift_out")(hidden)


@dataclass(frozen=True)
class Injection:
    """What stands for the bridge in SVGT-Inject; the same interface, with one vector for the K tokens."""

    config: InjectionConfig

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters, float32."""
        return jax.jit(lambda key: InjectionModule(self.config).init(key, jnp.zeros((1, self.config.value_dim)))["params"])(
            key
        )

    def propose(self, params: Tree, h_v: Array, dz: Array) -> Array:
        """What to add to the stream, [B, 1, D] float32; the trigger's state is not looked at."""
        with jax.default_matmul_precision("highest"):
            return self.config.strength * InjectionModule(self.config).apply({"params": params}, dz)[:, None]

    def gate(self, params: Tree) -> Array:
        """The strength."""
        return jnp.float32(self.config.strength)
