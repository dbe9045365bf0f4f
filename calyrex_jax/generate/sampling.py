"""Choosing the next token: greedy, temperature, top-k and top-p, without ever sorting a vocabulary."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array

_BLOCK = 256  # vocabulary entries a block of the two-step draw


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen from its logits.

    temperature  0 is greedy, the argmax over all rows of the embedding; else logits are divided by it
    top_k        only the k most probable tokens; 0 is off
    top_p        of these, the smallest set of most probable tokens whose mass is at least p; 1 is off
    seed         replies with the same seed, input line and prompt are the same, whatever their batch

    Raises UserError naming config.generate.FIELD.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        checks = {
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "0 (greedy) or more"),
            "top_k": (isinstance(self.top_k, int) and self.top_k >= 0, "a whole number, 0 (off) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1 (off)"),
            "seed": (isinstance(self.seed, int) and 0 <= self.seed < 2**32, "a whole number from 0 to 4294967295"),
        }
        for field, (good, expected) in checks.items():
            if not good:
                raise UserError(f"config.generate.{field}: got {getattr(self, field)!r}, expected {expected}")


def choose(logits: Array, sampling: Sampling, seed: Array, rows: Array, step: Array, vocab_limit: int) -> jax.Array:
    """The next token of every row: logits [B, V] float32 -> [B] int32.

    sampling     static; its seed is not read, so that a new seed needs no new compilation
    seed         uint32 scalar
    rows, step   [B] int32 index of the input line and int32 scalar number of the generated token: with the seed they fix
                 the row's random numbers
    vocab_limit  ids from here on have no tokenizer entry and are never sampled (greedy looks at all, as transformers does)
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    limit = min(vocab_limit, logits.shape[-1])
    logits = logits[:, :limit].astype(jnp.float32)
    # the largest becomes 0 first: a tiny temperature then gives minus infinities, not inf - inf
    logits = (logits - logits.max(-1, keepdims=True)) / max(sampling.temperature, 1e-30)
    base = jax.random.PRNGKey(seed)
    keys = jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(base, row), step))(rows)
    if 0 < sampling.top_k < limit:
        values, ids = jax.lax.top_k(logits, sampling.top_k)
        if sampling.top_p < 1:
            values = jnp.where(_leading(values, sampling.top_p), values, -jnp.inf)
        picked = jax.vmap(jax.random.categorical)(keys, values)
        return jnp.take_along_axis(ids, picked[:, None], axis=-1)[:, 0].astype(jnp.int32)
    if sampling.top_p < 1:
        logits = jnp.where(nucleus(logits, sampling.top_p), logits, -jnp.inf)
    return jax.vmap(_draw)(keys, logits)


def _leading(values: Array, top_p: float) -> jax.Array:
    """The nucleus of logits that are sorted from the largest down, [B, k] bool."""
    probabilities = jax.nn.softmax(values, axis=-1)
    return jnp.cumsum(probabilities, axis=-1) - probabilities < top_p


def nucleus(logits: Array, top_p: float) -> jax.Array:
    """The smallest set of most probable tokens with mass ≥ top_p, ties in order of id: [B, V] -> [B, V] bool.

        >>> nucleus(jnp.log(jnp.array([[0.1, 0.5, 0.4]])), 0.6)[0].tolist()
        [False, True, True]

    Bisects for the least probability that belongs to it, over float32's bit patterns, which order positive numbers as
    their values do: exact after 31 halvings, and more than ten times as fast as a sort of the vocabulary.
    """
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    needed = top_p * weights.sum(-1, keepdims=True)
    bits = jax.lax.bitcast_convert_type(weights, jnp.int32)
    # invariant: the mass of weights whose bits are at least `low` is at least `needed`
    low = jnp.zeros((logits.shape[0], 1), jnp.int32)
    high = jnp.full_like(low, 0x3F800000)  # the bits of 1.0, the largest weight

    def halve(_, bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        enough = jnp.where(bits >= middle, weights, 0.0).sum(-1, keepdims=True) >= needed
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    least = jax.lax.fori_loop(0, 31, halve, (low, high))[0]
    above, ties = bits > least, bits == least
    missing = needed - jnp.where(above, weights, 0.0).sum(-1, keepdims=True)
    mass_before = (jnp.cumsum(ties, axis=-1) - 1) * jax.lax.bitcast_convert_type(least, jnp.float32)
    return above | (ties & (mass_before < missing))


def _draw(key: Array, logits: Array) -> jax.Array:
    """One token from softmax(logits), [V] -> int32: first a block, then its entry, so that few random numbers are needed."""
    outer, inner = jax.random.split(key)
    blocks = jnp.pad(logits, (0, -logits.shape[0] % _BLOCK), constant_values=-jnp.inf).reshape(-1, _BLOCK)
    block = jax.random.categorical(outer, jax.nn.logsumexp(blocks, axis=-1))
    return (block * _BLOCK + jax.random.categorical(inner, blocks[block])).astype(jnp.int32)
