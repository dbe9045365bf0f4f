"""Cross-attention layer (CAL) blocks onto the system prompt (CALYREX, arXiv 2605.09737).

    X'  = X  + Attn(q = RMSNorm(X) W_Q, k = RMSNorm(X) W_K, v = RMSNorm(X) W_V) W_O     keys and values of the span alone
    X'' = X' + SwiGLU(RMSNorm(X')) W_D

With `copy` (ours, not the paper's; after the pointer-generator of See et al., arXiv 1704.04368) the attention also points:

    X' += rms(X) · sum over heads n of (RMSNorm(X) W_C)_n / D · sum over s of p_n(t, s) · c * RMSNorm(U_s)

with p_n the block's own attention weights, U_s the output head's row of the token at s and c a vector. Late states hold what
comes next rather than which token stands there, so that without this a word never seen in training is hard to copy.

W_O, W_D and W_C are zero at initialisation, so X'' equals X exactly; nothing else is, or their gradients would be zero too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import attend, attend_pointing, attention_weights, matmul
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
    copy              the path that points at tokens of the span
    rope_theta        None: positions do not matter, anchoring does not fade with distance; else the rotary base
    qk_norm           queries and keys are normed head by head before they meet (Henry et al., arXiv 2010.04245)
    mlp_dim           0: attention alone
    """

    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    norm_eps: float
    keys: Literal["span", "all"] = "span"
    gate_mlp_by_span: bool = True
    copy: bool = False
    rope_theta: float | None = None
    qk_norm: bool = False

    def __post_init__(self):
        if self.keys not in ("span", "all"):
            raise UserError(f"cal.keys_from: {self.keys!r} is not known; use 'span' or 'all'")
        if self.mlp_dim < 0:
            raise UserError(f"cal.mlp_dim: an mlp cannot be {self.mlp_dim} wide; use at least 1, or 0 for attention alone")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"cal.num_heads: {self.num_heads} query heads do not divide into groups of {self.num_kv_heads} key/value heads "
                "(cal.num_kv_heads); choose a multiple"
            )
        if self.rope_theta is not None and self.head_dim % 2:
            raise UserError(f"cal.rope: the head width {self.head_dim} is odd; rotary positions need an even one")


def sized(config: CalConfig, blocks: int, budget: int) -> CalConfig:
    """The config whose `blocks` blocks have `budget` parameters in all, to within a fraction of a percent.

    Heads come first: as many of the given ones, in the given groups where possible, as leave a third of a block for its mlp
    (about what a block of default size has); the mlp's width takes the rest. UserError where nothing is left for it.
    """
    d, h, groups = config.embed_dim, config.head_dim, config.num_heads // config.num_kv_heads
    norms = 2 * d + (d if config.copy else 0) + (2 * h if config.qk_norm else 0)
    layouts = [(k * groups, k) for k in range(config.num_kv_heads, 0, -1)] + [(n, 1) for n in range(groups - 1, 0, -1)]
    block = budget / blocks

    def attention(heads: int, kv_heads: int) -> int:
        return 2 * d * h * (heads + kv_heads) + (d * heads if config.copy else 0)

    heads, kv_heads = next((pair for pair in layouts if attention(*pair) + norms <= block * 0.67), layouts[-1])
    mlp_dim = round((block - attention(heads, kv_heads) - norms) / (3 * d))
    if mlp_dim < 1:
        raise UserError(
            f"config.ablate.match=parameters: {budget} parameters in {blocks} blocks leave nothing for their mlps; "
            "leave out this placement, or choose a larger reference"
        )
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, mlp_dim=mlp_dim)


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
        if c.copy:
            self.w_copy = self.param("w_copy", nn.initializers.zeros, (d, n))
            self.copy_scale = self.param("copy_scale", nn.initializers.ones, (d,))
        if c.qk_norm:
            self.q_norm = self.param("q_norm", nn.initializers.ones, (h,))
            self.k_norm = self.param("k_norm", nn.initializers.ones, (h,))
        self.w_o = self.param("w_o", nn.initializers.zeros, (n, h, d))
        if not f:
            return
        self.mlp_norm = self.param("mlp_norm", nn.initializers.ones, (d,))
        self.w_gate = self.param("w_gate", fan_in(), (d, f))
        self.w_up = self.param("w_up", fan_in(), (d, f))
        self.w_down = self.param("w_down", nn.initializers.zeros, (f, d))

    def keys_values(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """[B, S, D] -> keys and values [B, S, K, H]."""
        normed = _rms_norm(x, self.attn_norm, self.config.norm_eps)
        k, v = matmul(normed, self.w_k), matmul(normed, self.w_v)
        if self.config.qk_norm:
            k = _rms_norm(k, self.k_norm, self.config.norm_eps)
        if self.config.rope_theta is not None:
            k = _rotate(k, positions, self.config.rope_theta)
        return k, v

    def queries(self, x: Array, positions: Array) -> tuple[Array, Array]:
        """[B, T, D] -> queries [B, T, N, H], scaled, and the normed x that they are made of."""
        normed = _rms_norm(x, self.attn_norm, self.config.norm_eps)
        q = matmul(normed, self.w_q)
        if self.config.qk_norm:
            q = _rms_norm(q, self.q_norm, self.config.norm_eps)
        if self.config.rope_theta is not None:
            q = _rotate(q, positions, self.config.rope_theta)
        return q * self.config.head_dim**-0.5, normed

    def __call__(
        self, x: Array, positions: Array, k: Array, v: Array, outputs: Array | None, mask: Array, sees_span: Array
    ) -> Array:
        """X'' of the module's equations; outputs [B, S, D] are U (with `copy`), mask [B, T, S], sees_span [B, T]."""
        out = x
        if k.shape[1]:  # no slot at all: nobody sees anything, attention adds zero
            q, normed = self.queries(x, positions)
            if not self.config.copy:
                out = out + matmul(attend(q, k, v, mask), self.w_o, 2)
            else:
                gates = matmul(normed, self.w_copy).astype(jnp.float32) / self.config.embed_dim
                attended, pointed = attend_pointing(q, k, v, gates, mask)
                out = out + matmul(attended, self.w_o, 2)
                rows = _rms_norm(outputs, self.copy_scale, self.config.norm_eps).astype(jnp.float32)
                # eps: the root's slope at zero, where a row is padding, is infinite
                size = jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True) + self.config.norm_eps)
                out = out + (size * (pointed @ rows)).astype(x.dtype)
        if self.config.mlp_dim:
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
        block = CalBlock(self.config)
        none = jnp.zeros((1, 0, self.config.num_kv_heads, self.config.head_dim))
        arguments = (jnp.zeros((1, 1, self.config.embed_dim)), jnp.zeros((1, 1), jnp.int32), none, none, None)
        masks = (jnp.zeros((1, 1, 0), bool), jnp.zeros((1, 1), bool))
        # jitted: linen's init runs the block once, which op by op would compile dozens of programs
        init = jax.jit(lambda key: block.init(key, *arguments, *masks)["params"])
        keys = jax.random.split(key, len(self.boundaries))
        return {boundary_key(b): init(k) for b, k in zip(self.boundaries, keys)}

    def apply(self, params: Tree, site: Site) -> jax.Array:
        return self._whole(params, site)[0]

    def span_attention(self, params: Tree, site: Site) -> jax.Array:
        """One block's attention weights onto the slots of the span, [B, N, T, S] float32; unused slots get 0.

        With keys="span" the weights of a position that sees the span sum to 1, with "all" to what is left for the span.
        """
        source, _, positions, mask, _ = self._sources(site)
        block = CalBlock(self.config).bind({"params": params})
        k, _ = block.keys_values(source, positions)
        q, _ = block.queries(site.x, site.positions)
        weights = attention_weights(q, k, mask)
        if self.config.keys == "all":
            weights = jnp.take_along_axis(weights, jnp.maximum(site.span, 0)[:, None, None, :], axis=-1)
        return weights * (site.span >= 0)[:, None, None, :]

    def _sources(self, site: Site) -> tuple[Array, Array, Array, Array, Array]:
        """What can be attended to: states and output rows [B, S, D], positions [B, S], the mask [B, T, S]; and who sees the
        span, [B, T]. For keys="all", S is T.
        """
        length = site.x.shape[1]
        used = site.span >= 0
        index = jnp.maximum(site.span, 0)
        origin = jnp.take_along_axis(site.segments, index, axis=1)
        here = jnp.arange(length)[None, :, None]
        in_span = used[:, None, :] & (site.span[:, None, :] <= here) & (origin[:, None, :] == site.segments[:, :, None])
        sees_span = in_span.any(-1)
        if self.config.keys == "span":
            source, outputs = (jnp.take_along_axis(a, index[..., None], axis=1) for a in (site.x, site.outputs))
            return source, outputs, jnp.take_along_axis(site.positions, index, axis=1), in_span, sees_span
        same = (site.segments[:, :, None] == site.segments[:, None, :]) & (site.segments[:, :, None] > 0)
        return site.x, site.outputs, site.positions, same & jnp.tri(length, dtype=bool)[None], sees_span

    def _whole(self, params: Tree, site: Site) -> tuple[jax.Array, Tree]:
        """The adapted stream, and what the block attends to: keys and values [B, S, K, H], with `copy` outputs [B, S, D].

        For keys="all", S is T.
        """
        source, outputs, positions, mask, sees_span = self._sources(site)
        pointed = {"outputs": outputs} if self.config.copy else {}
        if self.config.gate_mlp_by_span and site.span.shape[1] == 0 and self.config.keys == "span":
            none = jnp.zeros((site.x.shape[0], 0, self.config.num_kv_heads, self.config.head_dim), site.x.dtype)
            return site.x, {"k": none, "v": none} | pointed
        block = CalBlock(self.config).bind({"params": params})
        k, v = block.keys_values(source, positions)
        out = block(site.x, site.positions, k, v, pointed.get("outputs"), mask, sees_span)
        return out, {"k": k, "v": v} | pointed

    def prefill(self, params: Tree, site: Site, capacity: int) -> tuple[jax.Array, Tree]:
        x, seen = self._whole(params, site)
        sees_span = (site.span >= 0).any(-1)  # a whole prompt's span lies before every token that follows it
        if self.config.keys == "span":
            return x, seen | {"valid": site.span >= 0, "sees_span": sees_span}
        seen = seen | {"valid": site.segments > 0}
        room = capacity - site.x.shape[1]
        grown = {name: jnp.pad(a, ((0, 0), (0, room)) + ((0, 0),) * (a.ndim - 2)) for name, a in seen.items()}
        return x, grown | {"sees_span": sees_span, "length": jnp.asarray(site.x.shape[1], jnp.int32)}

    def decode(self, params: Tree, site: Site, state: Tree) -> tuple[jax.Array, Tree]:
        if self.config.gate_mlp_by_span and state["k"].shape[1] == 0:
            return site.x, state
        block = CalBlock(self.config).bind({"params": params})
        if self.config.keys == "all":
            k, v = block.keys_values(site.x, site.positions)
            new = {"k": k, "v": v, "outputs": site.outputs, "valid": site.segments > 0}
            at = state["length"]
            for name in new.keys() & state.keys():
                place = (0, at) + (0,) * (new[name].ndim - 2)
                state = state | {name: jax.lax.dynamic_update_slice(state[name], new[name], place)}
            state = state | {"length": at + site.x.shape[1]}
        mask, sees_span = state["valid"][:, None, :], state["sees_span"][:, None]
        return block(site.x, site.positions, state["k"], state["v"], state.get("outputs"), mask, sees_span), state
