"""Where CAL blocks look: their attention onto the system text, by head, by token, and against the distance to it.

    seen = maps(model, params, cal, batch)         # every block's weights at the positions that predict the reply

The weights come from the block's own parameters (adapters/cal.py). With keys from the span alone they sum to one at any
distance; that they stay on the rule, and how much the block then adds to the stream, is what can fade.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.adapters.cal import Cal
from calyrex_jax.analysis.pairs import Reading
from calyrex_jax.analysis.states import Shape, batch_of
from calyrex_jax.backbones import decoder
from calyrex_jax.core.types import Array, Batch, Tree, bucket
from calyrex_jax.model import Model

ROLES = ("word", "rule", "rest")  # the word to copy, the rest of the rule's sentence, the rest of the system text


@dataclass(frozen=True)
class Maps:
    """Attention of all blocks over conversations, n of them at each distance.

    boundaries  [blocks]
    distances   [distances] tokens of neutral text between system prompt and question
    mass        [blocks, heads, roles, distances, n] of ROLES: mean over the positions that predict the reply
    share       [roles, distances, n] of the span's tokens: the mass that even attention would give
    added       [blocks, distances, n] |what the block adds| / |stream| at the same positions
    examples    for the first conversations at the smallest distance: (reading, weights [blocks, heads, M, S] over the
                span's S tokens at the M positions that predict the reply)
    """

    boundaries: tuple[int, ...]
    distances: tuple[int, ...]
    mass: np.ndarray
    share: np.ndarray
    added: np.ndarray
    examples: tuple[tuple[Reading, np.ndarray], ...]


def collect(
    model: Model,
    params: Tree,
    cal: Cal,
    readings: Sequence[Sequence[Reading]],
    distances: Sequence[int],
    examples: int = 2,
    advance: Callable[[int], None] = lambda _: None,
) -> Maps:
    """Maps of readings[distance][conversation], one at a time: long ones need as much memory as their forward pass."""
    kept, by_distance = [], []
    for number, group in enumerate(readings):
        shape = Shape.of(group, 1)
        # one program a distance, and few shapes in all
        shape = Shape(1, bucket(shape.length), shape.span, shape.targets)
        rows = []
        for reading in group:
            weights, added = jax.device_get(maps(model, params, cal, batch_of([reading], shape)))
            span, count = int(reading.system.sum()), int(reading.targets.sum())
            weights = weights[:, :, :count, :span]
            rows.append((_by_role(reading, weights.mean(2)), _share(reading), added[:, :count].mean(1)))
            if number == 0 and len(kept) < examples:
                kept.append((reading, weights))
            advance(1)
        by_distance.append([np.stack(part, axis=-1) for part in zip(*rows)])
    mass, share, added = (np.stack(part, axis=-2) for part in zip(*by_distance))
    return Maps(cal.boundaries, tuple(distances), mass, share, added, tuple(kept))


def _roles(reading: Reading) -> np.ndarray:
    """[roles, S] over the span's tokens."""
    word, rule = reading.word[reading.system], reading.rule[reading.system]
    return np.stack([word, rule & ~word, ~rule]).astype(np.float64)


def _by_role(reading: Reading, weights: np.ndarray) -> np.ndarray:
    """[blocks, heads, S] -> [blocks, heads, roles]."""
    return weights @ _roles(reading).T


def _share(reading: Reading) -> np.ndarray:
    return _roles(reading).mean(1)


@partial(jax.jit, static_argnums=(0, 2))
def maps(model: Model, params: Tree, cal: Cal, batch: Batch) -> tuple[Array, Array]:
    """One conversation: weights [blocks, N, M, S] and what blocks add [blocks, M], at the positions before the M targets.

    S are the slots of the batch's span, of which unused ones have weight 0; unused slots of targets hold any values.
    """
    backbone, spec = params["backbone"], model.spec
    at = jnp.maximum(batch.target_slots[0] - 1, 0)
    context = decoder.make_context(spec, batch.positions, batch.segments)
    outputs = decoder.head_rows(backbone, batch.tokens)
    x, layer, seen, added = decoder.embed(spec, backbone, batch.tokens, batch.positions), 0, [], []
    for boundary in model.boundaries:
        x, _ = decoder.run_layers(spec, backbone["layers"], x, context, layer, boundary)
        site = Site(x, outputs, batch.positions, batch.segments, batch.span, boundary)
        for adapter in model.adapters:
            if boundary not in adapter.boundaries:
                continue
            leaves = params["adapters"][adapter.name][boundary_key(boundary)]
            before = site.x
            if adapter.name == cal.name:
                seen.append(cal.span_attention(leaves, site)[0][:, at])
            site = site.replace(x=adapter.apply(leaves, site))
            if adapter.name == cal.name:
                wide = before[0, at].astype(jnp.float32)
                change = site.x[0, at].astype(jnp.float32) - wide
                added.append(jnp.linalg.norm(change, axis=-1) / jnp.linalg.norm(wide, axis=-1))
        x, layer = site.x, boundary
    return jnp.stack(seen), jnp.stack(added)
