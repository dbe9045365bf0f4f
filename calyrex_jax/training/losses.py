"""Next-token cross-entropy that never holds B·T·V logits and computes its gradient in the same pass.

Losses return a sum and a denominator; the average is taken once, over all microbatches and hosts (an average of
averages would favour short rows).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from calyrex_jax.core.placing import by_vocabulary
from calyrex_jax.core.quantized import table_logits, table_states
from calyrex_jax.core.types import Array, Batch, Tree


def shifted(x: Array, batch: Batch) -> tuple[Array, Array, Array]:
    """States, labels and weights of a batch's targets: token t at a target position is predicted from the state at t - 1.

    x [B, T, D] -> states [B, M, D], labels [B, M] int32, weights [B, M] float32; M is the number of target slots where
    the batch has them, else T. A target at the start of a segment has nothing before it and weighs 0.
    """
    slots, wanted = _slots(batch)
    before_slots = jnp.maximum(slots - 1, 0)
    states = jnp.take_along_axis(x, before_slots[..., None], axis=1)
    labels = jnp.take_along_axis(batch.tokens, slots, axis=1)
    here = jnp.take_along_axis(batch.segments, slots, axis=1)
    before = jnp.take_along_axis(batch.segments, before_slots, axis=1)
    weights = wanted & (slots > 0) & (here == before) & (here > 0)
    return states, labels, weights.astype(jnp.float32)


def distilled(batch: Batch) -> Array | None:
    """`batch.distill` at the positions of `shifted`: [B, M] bool, or None."""
    return None if batch.distill is None else jnp.take_along_axis(batch.distill, _slots(batch)[0], axis=1)


def _slots(batch: Batch) -> tuple[Array, Array]:
    """The positions that `shifted` looks at, and which of them are targets: both [B, M]."""
    if batch.target_slots is None:
        return jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape), batch.targets
    return jnp.maximum(batch.target_slots, 0), batch.target_slots >= 0


def compacted(states: Array, labels: Array, weights: Array, teacher: Array | None = None, soft: Array | None = None):
    """The same positions as one row, [1, B·M, …], those that count first and the distilled ones behind the others.

    `cross_entropy` skips chunks in which nothing counts, so the head's cost follows the targets and not the padding. For one
    device only: on several it would gather every row everywhere.
    """
    order = jnp.where(weights != 0, 0 if soft is None else soft.astype(jnp.int32), 2).reshape(-1).argsort(stable=True)

    def moved(array: Array | None) -> Array | None:
        return None if array is None else jnp.asarray(array).reshape(-1, *array.shape[2:])[order][None]

    return tuple(moved(array) for array in (states, labels, weights, teacher, soft))


def cross_entropy(
    states: Array,
    head: Tree,
    labels: Array,
    weights: Array,
    chunk: int = 128,
    teacher: Array | None = None,
    soft: Array | None = None,
) -> tuple[Array, Array]:
    """Sums over positions of the loss times weight, and of weight: two float32 scalars.

    The loss of a position is -log p(label), or where `soft` the Kullback-Leibler divergence of the model's prediction from
    that of the frozen states `teacher`. states, teacher [B, M, D], head [V, D] (frozen: no gradient; maybe quantised), labels
    [B, M], weights [B, M] float32, soft [B, M] bool. Positions go through the head `chunk` at a time, so B·chunk·V logits
    exist at once.
    """
    size = min(chunk, states.shape[1])
    room = -states.shape[1] % size

    def padded(array: Array | None) -> Array | None:
        if array is None or not room:
            return array
        return jnp.pad(array, ((0, 0), (0, room)) + ((0, 0),) * (array.ndim - 2))

    loss = _chunked(size, padded(states), head, padded(labels), padded(weights), padded(teacher), padded(soft))
    return loss, weights.sum()


def _split(size: int, *arrays: Array | None) -> tuple[Array | None, ...]:
    """[B, M, …] -> [M // size, B, size, …], so that a scan walks along the sequence and the batch stays sharded."""
    return jax.tree.map(lambda a: jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0), arrays)


def _chunk_logits(x: Array, head: Tree) -> Array:
    return by_vocabulary(table_logits(x, head))


def _softmax(x: Array, head: Tree) -> tuple[Array, Array, Array]:
    """Logits and probabilities [B, C, V], and the logarithm of the normaliser [B, C]."""
    logits = _chunk_logits(x, head)
    peak = logits.max(-1, keepdims=True)
    exps = jnp.exp(logits - peak)
    mass = exps.sum(-1, keepdims=True)
    return logits, exps / mass, (jnp.log(mass) + peak)[..., 0]


def _surprise(logits: Array, norm: Array, label: Array) -> tuple[Array, Array]:
    """-log p(label) [B, C], and where the label is, [B, C, V]."""
    picked = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
    return norm - picked, jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == label[..., None]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(size: int, states: Array, head: Tree, labels: Array, weights: Array, teacher, soft) -> Array:
    return _chunked_forward(size, states, head, labels, weights, teacher, soft)[0]


def _chunked_forward(size: int, states: Array, head: Tree, labels: Array, weights: Array, teacher, soft):
    def finish(x, weight, loss, slope):
        # d loss / d logits while the logits are at hand: the backward pass then needs no second head product
        slope = slope * weight[..., None]
        return (loss * weight).sum(), table_states(slope, head, x.dtype).astype(x.dtype)

    def hard(x, label, weight, teacher, soft):
        logits, found, norm = _softmax(x, head)
        loss, wanted = _surprise(logits, norm, label)
        return finish(x, weight, loss, found - wanted)

    def mixed(x, label, weight, teacher, soft):
        logits, found, norm = _softmax(x, head)
        loss, wanted = _surprise(logits, norm, label)
        theirs, probabilities, their_norm = _softmax(teacher, head)
        # an inner product and no sum of products: XLA's CPU backend is several times slower at the latter
        divergence = jnp.einsum("bcv,bcv->bc", probabilities, theirs - logits) - their_norm + norm
        wanted = jnp.where(soft[..., None], probabilities, wanted)
        return finish(x, weight, jnp.where(soft, divergence, loss), found - wanted)

    def nothing(x, label, weight, teacher, soft):
        return jnp.zeros((), jnp.float32), jnp.zeros_like(x)

    def body(total, part):
        # targets stand in front: the chunks behind the last one cost nothing
        counts = (part[2] != 0).any()
        if soft is None:
            loss, grad = jax.lax.cond(counts, hard, nothing, *part)
        else:
            kind = jnp.where(counts, 1 + (part[4] & (part[2] != 0)).any(), 0)
            loss, grad = jax.lax.switch(kind, (nothing, hard, mixed), *part)
        return total + loss, grad

    total, grads = jax.lax.scan(body, jnp.zeros((), jnp.float32), _split(size, states, labels, weights, teacher, soft))
    return total, jnp.moveaxis(grads, 0, 1).reshape(states.shape)


def _chunked_backward(size: int, grads: Array, cotangent: Array):
    return (grads * cotangent.astype(grads.dtype), None, None, None, None, None)


_chunked.defvjp(_chunked_forward, _chunked_backward)
