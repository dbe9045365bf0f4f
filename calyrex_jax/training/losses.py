"""Next-token cross-entropy that never holds B·T·V logits and computes its gradient in the same pass.

Losses return a sum and a denominator; the average is taken once, over all microbatches and hosts (an average of
averages would favour short rows).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from calyrex_jax.core.types import Array, Batch


def shifted(x: Array, batch: Batch) -> tuple[Array, Array, Array]:
    """States, labels and weights of a batch's targets: token t at a target position is predicted from the state at t - 1.

    x [B, T, D] -> states [B, M, D], labels [B, M] int32, weights [B, M] float32; M is the number of target slots where
    the batch has them, else T. A target at the start of a segment has nothing before it and weighs 0.
    """
    if batch.target_slots is None:
        slots = jnp.broadcast_to(jnp.arange(x.shape[1])[None], x.shape[:2])
        wanted = batch.targets
        states = jnp.roll(x, 1, axis=1)
    else:
        slots = jnp.maximum(batch.target_slots, 0)
        wanted = batch.target_slots >= 0
        states = jnp.take_along_axis(x, jnp.maximum(slots - 1, 0)[..., None], axis=1)
    labels = jnp.take_along_axis(batch.tokens, slots, axis=1)
    here = jnp.take_along_axis(batch.segments, slots, axis=1)
    before = jnp.take_along_axis(batch.segments, jnp.maximum(slots - 1, 0), axis=1)
    weights = wanted & (slots > 0) & (here == before) & (here > 0)
    return states, labels, weights.astype(jnp.float32)


def cross_entropy(states: Array, head: Array, labels: Array, weights: Array, chunk: int = 128) -> tuple[Array, Array]:
    """Sums over positions of -log p(label) · weight, and of weight: two float32 scalars.

    states [B, M, D], head [V, D] (frozen: it receives no gradient), labels [B, M], weights [B, M] float32. Positions go
    through the head `chunk` at a time, so B·chunk·V logits exist at once.
    """
    size = min(chunk, states.shape[1])
    room = -states.shape[1] % size
    if room:
        states = jnp.pad(states, ((0, 0), (0, room), (0, 0)))
        labels, weights = jnp.pad(labels, ((0, 0), (0, room))), jnp.pad(weights, ((0, 0), (0, room)))
    loss = _chunked(size, states, head, labels, weights)
    return loss, weights.sum()


def _split(size: int, *arrays: Array) -> tuple[Array, ...]:
    """[B, M, …] -> [M // size, B, size, …], so that a scan walks along the sequence and the batch stays sharded."""
    return tuple(jnp.moveaxis(a.reshape(a.shape[0], -1, size, *a.shape[2:]), 1, 0) for a in arrays)


def _chunk_logits(x: Array, head: Array) -> Array:
    return jnp.einsum("bcd,vd->bcv", x, head, preferred_element_type=jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(size: int, states: Array, head: Array, labels: Array, weights: Array) -> Array:
    def body(total, part):
        x, label, weight = part
        logits = _chunk_logits(x, head)
        picked = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
        return total + ((jax.nn.logsumexp(logits, axis=-1) - picked) * weight).sum(), None

    return jax.lax.scan(body, jnp.zeros((), jnp.float32), _split(size, states, labels, weights))[0]


def _chunked_forward(size: int, states: Array, head: Array, labels: Array, weights: Array):
    def chunk(x, label, weight):
        logits = _chunk_logits(x, head)
        peak = logits.max(-1, keepdims=True)
        exps = jnp.exp(logits - peak)
        mass = exps.sum(-1, keepdims=True)
        hit = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == label[..., None]
        picked = jnp.take_along_axis(logits, label[..., None], axis=-1)[..., 0]
        loss = ((jnp.log(mass[..., 0]) + peak[..., 0] - picked) * weight).sum()
        # d loss / d logits while the logits are at hand: the backward pass then needs no second head product
        slope = (exps / mass - hit) * weight[..., None]
        grad = jnp.einsum("bcv,vd->bcd", slope.astype(head.dtype), head, preferred_element_type=jnp.float32)
        return loss, grad.astype(x.dtype)

    def nothing(x, label, weight):
        return jnp.zeros((), jnp.float32), jnp.zeros_like(x)

    def body(total, part):
        # slots are filled from the front: the chunks behind a batch's last target cost nothing
        loss, grad = jax.lax.cond((part[2] != 0).any(), chunk, nothing, *part)
        return total + loss, grad

    total, grads = jax.lax.scan(body, jnp.zeros((), jnp.float32), _split(size, states, labels, weights))
    return total, jnp.moveaxis(grads, 0, 1).reshape(states.shape)


def _chunked_backward(size: int, grads: Array, cotangent: Array):
    return (grads * cotangent.astype(grads.dtype), None, None, None)


_chunked.defvjp(_chunked_forward, _chunked_backward)
