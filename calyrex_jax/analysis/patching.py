"""What moves the answer: states compared between the two conversations of each pair, and put in each other's place.

The conversations of a pair differ in the system text alone and are aligned, so that at every point in depth the states of one
can stand at the same positions of the other. Two places are patched, each by itself:

    question   everything after the system text: what the question and the reply have taken up of the rule so far
    system     the system text: what is still to be read there

The reply is the one that follows the rule of the conversation that is patched. Its log-probability falls by
`own - patched` nats; of the whole difference `own - other` that is the normalised effect: 0 as without the patch, 1 as in the
other conversation. By construction it is 0 for the question before the first layer and 1 after the last, and the other
way round for the system text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.analysis.pairs import Pair, Reading
from calyrex_jax.analysis.states import Shape, Walk, batch_of
from calyrex_jax.core.types import Array, Batch

PLACES = ("last_prompt", "answer")  # the last position of the prompt; the reply's tokens
PATCHES = ("question", "system")


@dataclass(frozen=True)
class Measured:
    """Arrays over P points in depth and n pairs; axis 2 is the rule (A, B), places and patches are PLACES and PATCHES.

    distance  [P, n, places] |h_A - h_B| over the mean of |h_A| and |h_B|, under one reply that follows neither rule
    cosine    [P, n, places] of h_A and h_B
    features  [P, n, 2, places, D] the states themselves, averaged over a place's positions
    own       [n, 2] log-probability of the reply that follows the rule, under that rule
    other     [n, 2] of the same reply under the other rule
    patched   [patches, P, n, 2] of the same reply under its rule, with the other conversation's states in one place
    """

    distance: np.ndarray
    cosine: np.ndarray
    features: np.ndarray
    own: np.ndarray
    other: np.ndarray
    patched: np.ndarray


def measure(walk: Walk, pairs: Sequence[Pair], batch_size: int, advance: Callable[[int], None] = lambda _: None) -> Measured:
    """All arrays, in batches of `batch_size` conversations (an even number); `advance` is told of finished points."""
    every = [reading for pair in pairs for two in (pair.plain, pair.first, pair.second) for reading in two]
    widest = Shape.of(every, batch_size)
    # pairs of like length together: less padding, for one more program a length
    order = sorted(range(len(pairs)), key=lambda i: len(pairs[i].first[0].tokens) + len(pairs[i].second[0].tokens))
    found: dict[str, list[np.ndarray]] = {field.name: [] for field in fields(Measured)}
    for at in range(0, len(pairs), batch_size // 2):
        group = [pairs[i] for i in order[at : at + batch_size // 2]]
        longest = Shape.of([r for pair in group for two in (pair.plain, pair.first, pair.second) for r in two], batch_size)
        shape = replace(widest, length=longest.length)
        for name, value in (_compare(walk, group, shape) | _patch(walk, group, shape, advance)).items():
            found[name].append(value)
    back, axes = np.argsort(order), {"own": 0, "other": 0, "patched": 2}
    joined = {name: (np.concatenate(parts, axes.get(name, 1)), axes.get(name, 1)) for name, parts in found.items()}
    return Measured(**{name: np.take(whole, back, axis=axis) for name, (whole, axis) in joined.items()})


def _compare(walk: Walk, pairs: Sequence[Pair], shape: Shape) -> dict[str, np.ndarray]:
    """distance, cosine and features of some pairs, at all points."""
    batch = batch_of([reading for pair in pairs for reading in pair.plain], shape)
    places = jnp.stack(list(_places(batch)), axis=1)
    found = [[], [], []]
    for x in _states(walk, batch):
        for parts, value in zip(found, jax.device_get(_distances(x, places))):
            parts.append(value[: len(pairs)])
    return dict(zip(("distance", "cosine", "features"), map(np.stack, found)))


def _places(batch: Batch) -> Iterator[Array]:
    """Masks [B, T] of PLACES; the reply without its last token, which predicts nothing of it."""
    yield jnp.roll(batch.targets, -1, axis=1) & ~batch.targets
    yield batch.targets & jnp.roll(batch.targets, -1, axis=1)


def _states(walk: Walk, batch: Batch) -> Iterator[Array]:
    x = walk.start(batch)
    yield x
    for index in range(len(walk.points) - 1):
        x = walk.advance(index, x, batch)
        yield x


@jax.jit
def _distances(x: Array, places: Array) -> tuple[Array, Array, Array]:
    """x [2n, T, D], the two of a pair side by side, places [2n, K, T] -> [n, K], [n, K] and [n, 2, K, D] float32."""
    x = x.astype(jnp.float32).reshape(-1, 2, *x.shape[1:])
    a, b = x[:, 0], x[:, 1]
    weights = places.astype(jnp.float32).reshape(-1, 2, *places.shape[1:])
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1)
    size_a, size_b = jnp.linalg.norm(a, axis=-1), jnp.linalg.norm(b, axis=-1)
    tiny = jnp.finfo(jnp.float32).tiny
    distance = 2 * jnp.linalg.norm(a - b, axis=-1) / jnp.maximum(size_a + size_b, tiny)
    cosine = jnp.sum(a * b, axis=-1) / jnp.maximum(size_a * size_b, tiny)
    mean = partial(jnp.einsum, "nt,nkt->nk")
    return mean(distance, weights[:, 0]), mean(cosine, weights[:, 0]), jnp.einsum("nrtd,nrkt->nrkd", x, weights)


def _patch(walk: Walk, pairs: Sequence[Pair], shape: Shape, advance: Callable[[int], None]) -> dict[str, np.ndarray]:
    """own, other and patched of some pairs. Both runs go on side by side, so that one point's states exist at a time."""
    own_batch, other_batch = (batch_of(list(_side(pairs, side)), shape) for side in (0, 1))
    masks = [after_system(own_batch), own_batch.system]
    # blocks that copy look at the tokens themselves, so these go with the states
    mixed = [own_batch.replace(tokens=jnp.where(mask, other_batch.tokens, own_batch.tokens)) for mask in masks]
    own, other = walk.start(own_batch), walk.start(other_batch)
    patched: list[list[Array]] = [[] for _ in PATCHES]
    for index in range(len(walk.points)):
        for found, mask, batch in zip(patched, masks, mixed):
            found.append(walk.onwards(index, jnp.where(mask[..., None], other, own), batch))
        if index + 1 < len(walk.points):
            own, other = (walk.advance(index, x, batch) for x, batch in ((own, own_batch), (other, other_batch)))
        jax.block_until_ready(own)
        advance(len(pairs))

    def by_pair(values: Array) -> np.ndarray:
        return np.asarray(values)[: 2 * len(pairs)].reshape(-1, 2)

    ends = by_pair(walk.logprobs(own, own_batch)), by_pair(walk.logprobs(other, other_batch))
    values = np.stack([np.stack([by_pair(one) for one in several]) for several in patched])
    return {"own": ends[0], "other": ends[1], "patched": values}


def _side(pairs: Sequence[Pair], side: int) -> Iterator[Reading]:
    for pair in pairs:
        yield from (pair.first[side], pair.second[side])


def after_system(batch: Batch) -> Array:
    """[B, T]: everything behind the last token of the system text."""
    last = jnp.max(jnp.where(batch.system, batch.positions, -1), axis=-1, keepdims=True)
    return (batch.positions > last) & (batch.segments > 0)
