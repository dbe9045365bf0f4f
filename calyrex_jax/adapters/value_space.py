"""The value space of SVGT (arXiv 2605.11712): a score of harm that is read from hidden states, and the step that undoes it.

    r = GELU(H_response W_r + b_r),  p = GELU(H_prompt W_p + b_p)
    unconditional   z = A(P(E(r)))
    conditional     z = A(P(E(LN0(r) + λ · LN(MHA(q = LN0(r), k = v = LN0(p))))))
    score           s = D(z), harmful where s > 0; sigmoid(s) is the harm probability
    correction      Δz = -η relu(s) g / |g|², g the gradient of D at z: the Newton step to s = 0

E: two post-norm transformer blocks. P: the last valid position, or softmax(E q / √Z) with a learned q. A: LN(GELU(W x + b)),
or two such blocks on the one pooled vector. D: Linear Z -> Z/2, GELU, Linear -> 1. LN0 has neither scale nor bias.

E and P are causal over the response by default (this project's reading), so that one pass gives s at every prefix. The
response's first state is that of the last prompt position, from which its first token is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.value_layers import Attention, Block, LayerNorm, LoneBlock, gelu
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import MASKED
from calyrex_jax.core.types import Array, Tree

# top-level keys of the parameters: what stage 2 of the curriculum adds, and all that stage 1 trains
STAGE_2_KEYS = ("conditional",)
STAGE_1_KEYS = ("response", "encoder_0", "encoder_1", "pool", "aggregate", "aggregate_0", "aggregate_1", "discriminator")

_FLAT = 1e-12  # |g|² below this gives no step: it would leave the region in which D is anything like linear


@dataclass(frozen=True)
class ValueSpaceConfig:
    """embed_dim is the backbone's D, value_dim Z; num_heads are those of the encoder's attention and of that to the prompt.

    pooling    "last": the last valid position; "attention": a learned query
    aggregate  "mlp": one map; "blocks": two transformer blocks
    causal     False: E sees the whole response and z is one vector (as published)
    step       η
    dropout    in training
    """

    embed_dim: int
    value_dim: int
    num_heads: int
    pooling: Literal["last", "attention"] = "last"
    aggregate: Literal["mlp", "blocks"] = "mlp"
    causal: bool = True
    step: float = 1.0
    dropout: float = 0.1

    def __post_init__(self):
        if self.pooling not in ("last", "attention"):
            raise UserError(f"config.svgt.pooling: {self.pooling!r} is not known; use 'last' or 'attention'")
        if self.aggregate not in ("mlp", "blocks"):
            raise UserError(f"config.svgt.aggregate: {self.aggregate!r} is not known; use 'mlp' or 'blocks'")
        if self.value_dim < 2:
            raise UserError(f"config.svgt.value_dim: got {self.value_dim}, expected at least 2; published are 128 and 256")
        if self.num_heads < 1 or self.value_dim % self.num_heads:
            raise UserError(
                f"config.svgt.num_heads: {self.num_heads} heads do not divide a value space of width {self.value_dim} "
                "(config.svgt.value_dim); choose a divisor"
            )
        if self.step <= 0:
            raise UserError(f"config.svgt.step: got {self.step}, expected above 0; 1 is the step to the decision boundary")
        if not 0 <= self.dropout < 1:
            raise UserError(f"config.svgt.dropout: got {self.dropout}, expected in [0, 1)")


class Conditional(nn.Module):
    """LN0(r) + λ · LN(MHA(q = LN0(r), k = v = LN0(p))): what stage 2 adds."""

    config: ValueSpaceConfig

    def setup(self):
        c = self.config
        self.prompt = nn.Dense(c.value_dim)
        self.attn = Attention(c.value_dim, c.num_heads, c.dropout)
        self.norm = LayerNorm()
        self.plain_norm = LayerNorm(use_scale=False, use_bias=False)
        self.strength = self.param("strength", nn.initializers.constant(3.0), ())

    def keys_values(self, prompt: Array) -> tuple[Array, Array]:
        """[B, P, D] -> [B, P, N, H] each."""
        return self.attn.keys_values(self.plain_norm(gelu(self.prompt(prompt))))

    def __call__(self, r: Array, k: Array, v: Array, mask: Array, train: bool = False) -> Array:
        """r [B, T, Z], k and v [B, P, N, H], mask [B, P] -> [B, T, Z]."""
        r = self.plain_norm(r)
        seen = jnp.broadcast_to(mask[:, None, :], (*r.shape[:2], mask.shape[1]))
        return r + self.strength * self.norm(self.attn(r, k, v, seen, train))


class Discriminator(nn.Module):
    """D: [..., Z] -> [...]."""

    dim: int

    @nn.compact
    def __call__(self, z: Array) -> Array:
        return nn.Dense(1, name="out")(gelu(nn.Dense(self.dim // 2, name="hidden")(z)))[..., 0]


class MlpAggregate(nn.Module):
    """LN(GELU(W x + b)): [..., Z] -> [..., Z]."""

    dim: int

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        return LayerNorm(name="norm")(gelu(nn.Dense(self.dim, name="map")(x)))


class ValueModule(nn.Module):
    """All parameters of the value space, and the functions that whole responses and growing ones share."""

    config: ValueSpaceConfig

    def setup(self):
        c = self.config
        self.response = nn.Dense(c.value_dim)
        self.conditional = Conditional(c)
        self.encoder = [Block(c.value_dim, c.num_heads, c.dropout) for _ in range(2)]
        if c.pooling == "attention":
            self.pool = self.param("pool", nn.initializers.normal(0.02), (c.value_dim,))
        if c.aggregate == "mlp":
            self.aggregate = [MlpAggregate(c.value_dim, name="aggregate")]
        else:
            self.aggregate = [LoneBlock(c.value_dim, c.dropout) for _ in range(2)]
        self.discriminator = Discriminator(c.value_dim)

    def __call__(self, states: Array, mask: Array) -> Array:
        """Touches every parameter, for their initialisation."""
        seen = (*self.prompt_keys_values(states, mask), mask)
        return self.score(self.finished(self.pooled(self.encoded(self.inputs(states, mask, seen), mask), mask)))

    def prompt_keys_values(self, prompt: Array, mask: Array) -> tuple[Array, Array]:
        """[B, P, D] -> [B, P, N, H] each."""
        return self.conditional.keys_values(_real(prompt, mask))

    def inputs(self, response: Array, mask: Array, seen: tuple | None, train: bool = False) -> Array:
        """E's inputs [B, T, Z]; `seen`: keys, values and mask of the prompt, or None on the unconditional path."""
        r = gelu(self.response(_real(response, mask)))
        return r if seen is None else self.conditional(r, *seen, train)

    def encoded(self, x: Array, mask: Array, train: bool = False) -> Array:
        """E over whole responses: x [B, T, Z], mask [B, T] -> [B, T, Z]."""
        visible = jnp.broadcast_to(mask[:, None, :], (*mask.shape, mask.shape[1]))
        if self.config.causal:
            visible = visible & jnp.tri(mask.shape[1], dtype=bool)
        for block in self.encoder:
            x = block(x, *block.keys_values(x), visible, train)
        return x

    def pooled(self, x: Array, mask: Array) -> Array:
        """P of what E gave, [B, T, Z]: at every position where causal, else [B, 1, Z]."""
        if self.config.pooling == "attention":
            top, mass, total = self.scan_parts(x, mask)
            if not self.config.causal:
                top, mass, total = top[:, -1:], mass[:, -1:], total[:, -1:]
            return _mean(mass, total)
        if self.config.causal:
            return x
        last = x.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
        return jnp.take_along_axis(x, last[:, None, None], axis=1)

    def scan_parts(self, x: Array, mask: Array) -> tuple[Array, Array, Array]:
        """Attention pooling up to each position: the largest score, numerator and denominator relative to it."""
        return jax.lax.associative_scan(_merge, self.pool_parts(x, mask), axis=1)

    def pool_parts(self, x: Array, mask: Array) -> tuple[Array, Array, Array]:
        """Each position's own share of `scan_parts`: [B, T], [B, T], [B, T, Z]."""
        scores = jnp.where(mask, x @ self.pool * self.config.value_dim**-0.5, MASKED)
        # relative to itself a score's exponential is 1, but its slope is not 0: that is all a backward pass needs
        top = jax.lax.stop_gradient(scores)
        mass = jnp.where(mask, jnp.exp(scores - top), 0.0)
        return top, mass, mass[..., None] * x

    def finished(self, x: Array, train: bool = False) -> Array:
        """A: [..., Z] -> [..., Z]."""
        for part in self.aggregate:
            x = part(x, train)
        return x

    def score(self, z: Array) -> Array:
        """D: [..., Z] -> [...]."""
        return self.discriminator(z)

    def grown(self, state: Tree, x: Array) -> tuple[Array, Tree]:
        """Causal E and P at the newest of C further positions, x [B, C, Z] -> [B, Z], and the caches with them."""
        length, size = state["length"], x.shape[1]
        slots = jnp.arange(state["keys"][0].shape[1])
        visible = slots[None, :] <= length + jnp.arange(size)[:, None]
        visible = jnp.broadcast_to(visible[None], (x.shape[0], *visible.shape))
        keys, values = list(state["keys"]), list(state["values"])
        for i, block in enumerate(self.encoder):
            k, v = block.keys_values(x)
            keys[i] = jax.lax.dynamic_update_slice(keys[i], k, (0, length, 0, 0))
            values[i] = jax.lax.dynamic_update_slice(values[i], v, (0, length, 0, 0))
            x = block(x, keys[i], values[i], visible)
        state = state | {"keys": tuple(keys), "values": tuple(values), "length": length + size}
        if self.config.pooling == "last":
            return x[:, -1], state
        own = self.scan_parts(x, jnp.ones(x.shape[:2], bool))
        parts = _merge(state["pooled"], tuple(a[:, -1] for a in own))
        return _mean(parts[1], parts[2]), state | {"pooled": parts}

    def renewed(self, state: Tree, x: Array) -> tuple[Array, Tree]:
        """E and P over the whole of a response that has C further positions: for E that is not causal."""
        length = state["length"] + x.shape[1]
        inputs = jax.lax.dynamic_update_slice(state["inputs"], x, (0, state["length"], 0))
        mask = jnp.broadcast_to(jnp.arange(inputs.shape[1]) < length, inputs.shape[:2])
        pooled = self.pooled(self.encoded(inputs, mask), mask)
        return pooled[:, 0], state | {"inputs": inputs, "length": length}


def _real(states: Array, mask: Array) -> Array:
    """States in float32, zeros in padding: whatever stood there, not-a-numbers too, reaches no sum and no gradient."""
    return jnp.where(mask[..., None], states.astype(jnp.float32), 0.0)


def _merge(a: tuple, b: tuple) -> tuple:
    """Two runs of positions as one: (largest score, numerator's and denominator's sums relative to it)."""
    top = jnp.maximum(a[0], b[0])
    left, right = jnp.exp(a[0] - top), jnp.exp(b[0] - top)
    return top, a[1] * left + b[1] * right, a[2] * left[..., None] + b[2] * right[..., None]


def _mean(mass: Array, total: Array) -> Array:
    # the mass is at least 1 where anything was valid, else 0
    return total / jnp.maximum(mass, 0.5)[..., None]


@dataclass(frozen=True)
class ValueSpace:
    """The value space of one backbone; everything is computed in float32.

    value = ValueSpace(ValueSpaceConfig(embed_dim=576, value_dim=128, num_heads=4))
    params = value.init(key)
    z = value.values(params, response, response_mask, prompt, prompt_mask)     # [B, T, Z]
    harm = jax.nn.sigmoid(value.score(params, z))                              # [B, T]
    """

    config: ValueSpaceConfig

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters, float32; what stage 2 adds lies below the keys STAGE_2_KEYS."""
        states = jnp.zeros((1, 1, self.config.embed_dim))
        # jitted: linen's init runs the modules once, which op by op would compile dozens of programs
        return jax.jit(lambda key: ValueModule(self.config).init(key, states, jnp.ones((1, 1), bool))["params"])(key)

    def values(
        self,
        params: Tree,
        response: Array,
        response_mask: Array,
        prompt: Array | None = None,
        prompt_mask: Array | None = None,
        key: Array | None = None,
    ) -> Array:
        """z [B, T, Z] of every prefix of the responses, or [B, 1, Z] of the whole where E is not causal.

        response [B, T, D], response_mask [B, T] bool, padded on any side; z at padding is finite and means nothing.
        prompt [B, P, D], prompt_mask [B, P], or None: the unconditional path. key: dropout's, in training.
        """
        train = key is not None
        module = ValueModule(self.config).bind({"params": params}, rngs={"dropout": key} if train else None)
        with jax.default_matmul_precision("highest"):
            seen = None if prompt is None else (*module.prompt_keys_values(prompt, prompt_mask), prompt_mask)
            x = module.encoded(module.inputs(response, response_mask, seen, train), response_mask, train)
            return module.finished(module.pooled(x, response_mask), train)

    def score(self, params: Tree, z: Array) -> Array:
        """s: [..., Z] -> [...]; harmful where above 0."""
        with jax.default_matmul_precision("highest"):
            return self._bound(params).score(z)

    def correction(self, params: Tree, z: Array) -> Array:
        """Δz [..., Z]: exactly 0 where s ≤ 0."""
        score, pull = jax.vjp(lambda z: self.score(params, z), z)
        (slope,) = pull(jnp.ones_like(score))
        size = jnp.sum(slope * slope, axis=-1)
        # guarded before the division: a where behind it would still have a NaN gradient
        moves = (score > 0) & (size > _FLAT)
        share = jnp.where(moves, score, 0.0) / jnp.where(moves, size, 1.0)
        return jnp.where(moves[..., None], -self.config.step * share[..., None] * slope, 0.0)

    def begin(self, params: Tree, prompt: Array, prompt_mask: Array, capacity: int) -> Tree:
        """The state that `extend` carries, of fixed shapes: the prompt's keys and values, and room for `capacity` states."""
        c, rows = self.config, prompt.shape[0]
        with jax.default_matmul_precision("highest"):
            k, v = self._bound(params).prompt_keys_values(prompt, prompt_mask)
        state = {"prompt": (k, v, jnp.asarray(prompt_mask)), "length": jnp.zeros((), jnp.int32)}
        if not c.causal:
            return state | {"inputs": jnp.zeros((rows, capacity, c.value_dim))}
        shape = (rows, capacity, c.num_heads, c.value_dim // c.num_heads)
        state |= {name: (jnp.zeros(shape), jnp.zeros(shape)) for name in ("keys", "values")}
        if c.pooling == "attention":
            state["pooled"] = (jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows), jnp.zeros((rows, c.value_dim)))
        return state

    def extend(self, params: Tree, state: Tree, chunk: Array) -> tuple[Array, Tree]:
        """z [B, Z] of the responses with C further states, chunk [B, C, D], and the next state.

        All rows go in lockstep. The caller sees to it that no more than `capacity` states come: beyond, they would
        overwrite the last ones.
        """
        grow = ValueModule.grown if self.config.causal else ValueModule.renewed
        module = self._bound(params)
        with jax.default_matmul_precision("highest"):
            x = module.inputs(chunk, jnp.ones(chunk.shape[:2], bool), state["prompt"])
            x, state = grow(module, state, x)
            return module.finished(x), state

    def _bound(self, params: Tree) -> ValueModule:
        return ValueModule(self.config).bind({"params": params})
