"""What the value space and the bridge are built from: linear maps, layer norm, attention and a post-norm block, in float32.

As torch has them (nn.MultiheadAttention, nn.TransformerEncoderLayer with norm_first=False), with exact GELU, but without
the one leaf that cannot matter: a bias on keys adds the same number to all of a query's scores, and softmax takes it out.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

from calyrex_jax.core.numerics import attend, attention_weights
from calyrex_jax.core.types import Array

gelu = partial(jax.nn.gelu, approximate=False)
# fast variance, E x² - (E x)², loses all digits where a state's mean is large beside its spread
LayerNorm = partial(nn.LayerNorm, epsilon=1e-5, use_fast_variance=False)


class Attention(nn.Module):
    """Softmax attention of `num_heads` heads over a width of `dim`; keys and values are made apart, so that they can be kept."""

    dim: int
    num_heads: int
    dropout: float = 0.0

    def setup(self):
        heads = (self.num_heads, self.dim // self.num_heads)
        self.query = nn.DenseGeneral(heads)
        self.key = nn.DenseGeneral(heads, use_bias=False)
        self.value = nn.DenseGeneral(heads)
        self.out = nn.DenseGeneral(self.dim, axis=(-2, -1))
        self.drop = nn.Dropout(self.dropout)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """[B, S, dim] -> [B, S, N, H] each."""
        return self.key(x), self.value(x)

    def __call__(self, x: Array, k: Array, v: Array, mask: Array, train: bool = False) -> Array:
        """x [B, T, dim], k and v [B, S, N, H], mask [B, T, S] -> [B, T, dim]; a query that sees nothing gets the bias."""
        q = self.query(x) * (self.dim // self.num_heads) ** -0.5
        if not (train and self.dropout):
            return self.out(attend(q, k, v, mask))
        weights = self.drop(attention_weights(q, k, mask), deterministic=False)
        return self.out(jnp.einsum("bnts,bsnh->btnh", weights, v))


class Transform(nn.Module):
    """The second half of a block: LN(x + mixed), then LN(x + mlp(x)) with an mlp four times as wide."""

    dim: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array, mixed: Array, train: bool = False) -> Array:
        drop = partial(nn.Dropout(self.dropout), deterministic=not train)
        x = LayerNorm(name="attn_norm")(x + drop(mixed))
        inner = drop(gelu(nn.Dense(4 * self.dim, name="up")(x)))
        return LayerNorm(name="mlp_norm")(x + drop(nn.Dense(self.dim, name="down")(inner)))


class Block(nn.Module):
    """A post-norm transformer block over a sequence."""

    dim: int
    num_heads: int
    dropout: float = 0.0

    def setup(self):
        self.attn = Attention(self.dim, self.num_heads, self.dropout)
        self.rest = Transform(self.dim, self.dropout)

    def keys_values(self, x: Array) -> tuple[Array, Array]:
        """What positions x [B, S, dim] show to others: [B, S, N, H] each."""
        return self.attn.keys_values(x)

    def __call__(self, x: Array, k: Array, v: Array, mask: Array, train: bool = False) -> Array:
        """x [B, T, dim] attends to k and v [B, S, N, H] as mask [B, T, S] allows."""
        return self.rest(x, self.attn(x, k, v, mask, train), train)


class LoneBlock(nn.Module):
    """A post-norm transformer block over sequences of one vector: [..., dim] -> [..., dim].

    A softmax over one score is 1, so attention is the output map of the value, and there are no queries and keys.
    """

    dim: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        mixed = nn.Dense(self.dim, name="out")(nn.Dense(self.dim, name="value")(x))
        return Transform(self.dim, self.dropout, name="rest")(x, mixed, train)
