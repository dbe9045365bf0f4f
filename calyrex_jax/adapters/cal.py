"""Cross-attention layer (CAL) blocks onto the system prompt (CALYREX, arXiv 2605.09737).

    X'  = X  + Attn(q = RMSNorm(X) W_Q, k = RMSNorm(X) W_K, v = RMSNorm(X) W_V) W_O     keys and values of the span alone
    X'' = X' + SwiGLU(RMSNorm(X')) W_D

W_O and W_D are zero at initialisation, so X'' equals X exactly; nothing else is, or their gradients would be zero too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import attend, matmul
from calyrex_jax.core.types import Array, Tree


def default_mlp_dim(embed_dim: int) -> int:
    """Half the model width, rounded down to a multiple of 128 where that leaves one: 576 -> 256, 4096 -> 2048."""
    half = embed_dim // 2
    return half // 128 * 128 or half


@dataclass(frozen=True)
class CalConfig:
    """What a CAL block is made of; the head layout is the backbone's (this project's reading of the paper).

    keys              "span": keys and values from the system span; "all": from every position, the control
    gate_mlp_by_span  a position that sees no span position passes unchanged, so that no system prompt means no change
    rope_theta        None: positions do not matter, anchoring does not fade with distance; else the rotary base
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    keys: Literal["span", "all"] = "span"
    gate_mlp_by_span: bool = True
    rope_theta: float | None = None

    def __post_init__(self):
        if self.keys not in ("span", "all"):
            raise UserError(f"cal.keys_from: {self.keys!r} is not known; use 'span' or 'all'")
        if self.mlp_dim < 1:
            raise UserError(f"cal.mlp_dim: {self.mlp_dim} leaves no mlp; use at least 1")
        if self.rope_theta is not None and self.head_dim % 2:
            raise UserError(f"cal.rope: the head width {self.head_dim} is odd; rotary positions need an even one")


def _rms_norm(x: Array, scale: Array, eps: float) -> Array:
    # float32: the mean of squares of a bfloat16 stream loses three decimal digits
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype)


def _rotate(x: Array, positions: Array, theta: float) -> Array:
    """Rotary phases on [B, T, heads, H]; float32 because bfloat16 phases are off by whole turns at position 8191."""
    half = x.shape[-1] // 2
    inverse = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    phase = (positions[..., None].astype(jnp.float32) * inverse)[:, :, None, :]
    a, b = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    cos, sin = jnp.cos(phase), jnp.sin(phase)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class CalBlock(nn.Module):
    """One CAL block; parameters in float32, arithmetic in the stream's type."""

    config: CalConfig

    def setup(self):
        c = self.config
        fan_in = nn.initializers.lecun_normal
        d, n, k, h, f = c.embed_dim, c.num_heads, c.num_kv_heads, c.head_dim, c.mlp_dim
        self.attn_norm = self.param("attn_norm", nn.initializers.ones, (d,))
        self.w_q = self.param("w_q", fan_in(in_axis=0, out_axis=(1, 2)), (d, n, h))
        self.w_k = self.param("w_k", fan_in(in_axis=0, out_axis=(1, 2)), (d, k, h))
        self.w_v = self.param("w_v", fan_in(in_axis=0, out_axis=(1, 2)), (d, k, h))
        self.w_o = self.param("w_o", nn.initializers.zeros, (n, h, d))
        self.mlp_norm = self.param("mlp_norm", nn.initializers.ones, (d,))
        self.w_gate = self.param("w_gate", fan_in(), (d, f))
        self.w_up = self.param("w_up", fan_in(), (d, f))
        self.w_down = self.param("w_down", nn.initializers.zeros, (f, d))

    def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """[B, S, D] -> keys and values [B, S, K, H]."""
        normed = _rms_norm(x, self.attn_norm, self.config.norm_eps)
        k, v = matmul(normed, self.w_k), matmul(normed, self.w_v)
        if self.config.rope_theta is not None:
            k = _rotate(k, positions, self.config.rope_theta)
        return k, v

    def __call__(self, x: Array, positions: Array, k: Array, v: Array, mask: Array, sees_span: Array) -> Array:
        """X'' of the module's equations; mask [B, T, S], sees_span [B, T]."""
        out = x
        if k.shape[1]:  # no slot at all: nobody sees anything, attention adds zero
            q = matmul(_rms_norm(x, self.attn_norm, self.config.norm_eps), self.w_q)
            if self.config.rope_theta is not None:
                q = _rotate(q, positions, self.config.rope_theta)
            out = out + matmul(attend(q * self.config.head_dim**-0.5, k, v, mask), self.w_o, 2)
        normed = _rms_norm(out, self.mlp_norm, self.config.norm_eps)
        # float32 between the maps: on CPUs an activation of bfloat16 numbers takes twice as long
        inner = jax.nn.silu(matmul(normed, self.w_gate).astype(jnp.float32)) * matmul(normed, self.w_up)
        out = out + matmul(inner.astype(out.dtype), self.w_down)
        return jnp.where(sees_span[..., None], out, x) if self.config.gate_mlp_by_span else out


@dataclass(frozen=True)
class Cal:
    """The CAL adapter: a block at every boundary of a placement.

    A query at t may see span position s iff `system[s] and s <= t and same_segment(s, t)`.
    """

    config: CalConfig
    boundaries: tuple[int, ...]
    name: str = "cal"

    def init(self, key: jax.Array) -> Tree:
        block, width = CalBlock(self.config), self.config.embed_dim
        none = jnp.zeros((1, 0, self.config.num_kv_heads, self.config.head_dim))
        arguments = (jnp.zeros((1, 1, width)), jnp.zeros((1, 1), jnp.int32), none, none)
        masks = (jnp.zeros((1, 1, 0), bool), jnp.zeros((1, 1), bool))
        # jitted: linen's init runs the block once, which op by op would compile dozens of programs
        init = jax.jit(lambda key: block.init(key, *arguments, *masks)["params"])
        keys = jax.random.split(key, len(self.boundaries))
        return {boundary_key(b): init(k) for b, k in zip(self.boundaries, keys)}

    def apply(self, params: Tree, site: Site) -> jax.Array:
        return self._whole(params, site)[0]

    def _whole(self, params: Tree, site: Site) -> tuple[jax.Array, Array, Array]:
        """The adapted stream and the block's keys and values: [B, S, K, H], or [B, T, K, H] for keys="all"."""
        length = site.x.shape[1]
        used = site.span >= 0
        index = jnp.maximum(site.span, 0)
        origin = jnp.take_along_axis(site.segments, index, axis=1)
        here = jnp.arange(length)[None, :, None]
        in_span = used[:, None, :] & (site.span[:, None, :] <= here) & (origin[:, None, :] == site.segments[:, :, None])
        sees_span = in_span.any(-1)
        if self.config.keys == "span":
            source = jnp.take_along_axis(site.x, index[..., None], axis=1)
            positions, mask = jnp.take_along_axis(site.positions, index, axis=1), in_span
        else:
            same = (site.segments[:, :, None] == site.segments[:, None, :]) & (site.segments[:, :, None] > 0)
            source, positions, mask = site.x, site.positions, same & jnp.tri(length, dtype=bool)[None]
        if self.config.gate_mlp_by_span and site.span.shape[1] == 0 and self.config.keys == "span":
            shape = (site.x.shape[0], 0, self.config.num_kv_heads, self.config.head_dim)
            return site.x, jnp.zeros(shape, site.x.dtype), jnp.zeros(shape, site.x.dtype)
        block = CalBlock(self.config).bind({"params": params})
        k, v = block.keys_values(source, positions)
        return block(site.x, site.positions, k, v, mask, sees_span), k, v

    def prefill(self, params: Tree, site: Site, capacity: int) -> tuple[jax.Array, Tree]:
        x, k, v = self._whole(params, site)
        sees_span = (site.span >= 0).any(-1)  # a whole prompt's span lies before every token that follows it
        if self.config.keys == "span":
            return x, {"k": k, "v": v, "valid": site.span >= 0, "sees_span": sees_span}
        room = capacity - site.x.shape[1]
        grow = ((0, 0), (0, room), (0, 0), (0, 0))
        valid = jnp.pad(site.segments > 0, ((0, 0), (0, room)))
        length = jnp.asarray(site.x.shape[1], jnp.int32)
        return x, {"k": jnp.pad(k, grow), "v": jnp.pad(v, grow), "valid": valid, "sees_span": sees_span, "length": length}

    def decode(self, params: Tree, site: Site, state: Tree) -> tuple[jax.Array, Tree]:
        if self.config.gate_mlp_by_span and state["k"].shape[1] == 0:
            return site.x, state
        block = CalBlock(self.config).bind({"params": params})
        if self.config.keys == "all":
            k, v = block.keys_values(site.x, site.positions)
            at = state["length"]
            state = state | {
                "k": jax.lax.dynamic_update_slice(state["k"], k, (0, at, 0, 0)),
                "v": jax.lax.dynamic_update_slice(state["v"], v, (0, at, 0, 0)),
                "valid": jax.lax.dynamic_update_slice(state["valid"], site.segments > 0, (0, at)),
                "length": at + site.x.shape[1],
            }
        mask = state["valid"][:, None, :]
        return block(site.x, site.positions, state["k"], state["v"], mask, state["sees_span"][:, None]), state
