"""The residual stream at every point in depth, one layer at a time, so that it can be read and replaced.

    walk = Walk(model, params)
    x = walk.start(batch)                      # at walk.points[0]
    x = walk.advance(0, x, batch)              # at walk.points[1]
    walk.logprobs(x, batch)                    # from the last point

One program runs any layer (layers with other windows have one of their own), so that runs that begin anywhere share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.analysis.pairs import Reading
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array, Batch, Tree, bucket, slots
from calyrex_jax.generate.score import token_logprobs
from calyrex_jax.model import Model

_LENGTHS = 16  # sequences are padded to multiples of this


@dataclass(frozen=True)
class Point:
    """A place in depth: after `boundary` layers; `adapted`: after the adapters' blocks at that boundary as well.

    >>> [str(Point(26)), str(Point(26, True))]
    ['26', '26+']
    """

    boundary: int
    adapted: bool = False

    def __str__(self) -> str:
        return f"{self.boundary}+" if self.adapted else str(self.boundary)


def points_of(model: Model) -> tuple[Point, ...]:
    """All points from the embedding to the last layer's output, in order."""
    found = []
    for boundary in range(model.spec.num_layers + 1):
        found += [Point(boundary)] + [Point(boundary, True)] * (boundary in model.boundaries)
    return tuple(found)


@dataclass(frozen=True)
class Walk:
    """A model with its parameters, walked point by point; states are [B, T, D] in the backbone's type.

    Raises UserError for an adapter that changes the layers themselves.
    """

    model: Model
    params: Tree

    def __post_init__(self) -> None:
        within = [adapter.name for adapter in self.model.adapters if not adapter.boundaries]
        if within:
            raise UserError(
                f"config.adapter.name: {', '.join(within)} changes the layers themselves, and the analysis runs these as the "
                "backbone has them; choose adapters with blocks at boundaries, or merge it into the backbone"
            )

    @property
    def points(self) -> tuple[Point, ...]:
        return points_of(self.model)

    def start(self, batch: Batch) -> jax.Array:
        """The embedding of a batch."""
        return decoder.embed(self.model.spec, self.params["backbone"], batch.tokens, batch.positions)

    def advance(self, index: int, x: Array, batch: Batch) -> jax.Array:
        """From point `index` to the next."""
        here, there = self.points[index : index + 2]
        if there.adapted:
            leaves = {a.name: self.params["adapters"][a.name] for a in self.model.adapters}
            return _blocks(self.model, there.boundary, leaves, self.params["backbone"], x, batch)
        alone, layers = _alone(self.model.spec, here.boundary), self.params["backbone"]["layers"]
        return _layer(alone, layers, np.int32(here.boundary), x, batch.positions, batch.segments)

    def onwards(self, index: int, x: Array, batch: Batch) -> jax.Array:
        """From point `index` to the end: the sum of the targets' log-probabilities a row, [B] float32."""
        for at in range(index, len(self.points) - 1):
            x = self.advance(at, x, batch)
        return self.logprobs(x, batch)

    def logprobs(self, x: Array, batch: Batch) -> jax.Array:
        """The sum of the targets' log-probabilities, [B] float32 nats, from states at the last point."""
        return _logprobs(self.model.spec, self.params["backbone"], x, batch)


def _alone(spec: DecoderSpec, layer: int) -> DecoderSpec:
    """A decoder of that one layer; equal for all layers that share a program."""
    scale = spec.scale / (layer + 1) if spec.inverse_layer_scale else spec.scale
    return replace(spec, num_layers=1, windows=(spec.windows[layer],), scale=scale, inverse_layer_scale=False)


@partial(jax.jit, static_argnums=0)
def _layer(alone: DecoderSpec, layers: Tree, layer: Array, x: Array, positions: Array, segments: Array) -> jax.Array:
    context = decoder.make_context(alone, positions, segments)
    taken = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, layer, 1), layers)
    return decoder.run_layers(alone, taken, x, context, 0, 1)[0]


@partial(jax.jit, static_argnums=(0, 1))
def _blocks(model: Model, boundary: int, adapters: Tree, backbone: Tree, x: Array, batch: Batch) -> jax.Array:
    outputs = decoder.head_rows(backbone, batch.tokens)
    site = Site(x, outputs, batch.positions, batch.segments, batch.span, boundary)
    for adapter in model.adapters:
        if boundary in adapter.boundaries:
            site = site.replace(x=adapter.apply(adapters[adapter.name][boundary_key(boundary)], site))
    return site.x


@partial(jax.jit, static_argnums=0)
def _logprobs(spec: DecoderSpec, backbone: Tree, x: Array, batch: Batch) -> jax.Array:
    used = batch.target_slots > 0
    at = jnp.maximum(batch.target_slots, 1)
    states = jnp.take_along_axis(x, (at - 1)[..., None], axis=1)  # token t is predicted from t - 1
    labels = jnp.take_along_axis(batch.tokens, at, axis=1)
    states = decoder.final_norm(spec, backbone, states)
    return jnp.sum(token_logprobs(states, decoder.head_matrix(backbone), labels) * used, axis=-1)


@dataclass(frozen=True)
class Shape:
    """What all batches of an analysis are padded to: rows, tokens, slots of the span and of targets."""

    rows: int
    length: int
    span: int
    targets: int

    @classmethod
    def of(cls, readings: Sequence[Reading], rows: int) -> Shape:
        """The smallest shape for all of `readings`, so that everything is compiled once."""

        def up(count: int) -> int:
            return -(-count // _LENGTHS) * _LENGTHS

        span = max(int(r.system.sum()) for r in readings)
        targets = max(int(r.targets.sum()) for r in readings)
        return cls(rows, up(max(len(r.tokens) for r in readings)), bucket(span), up(targets))


def batch_of(readings: Sequence[Reading], shape: Shape) -> Batch:
    """One conversation a row, from position 0; rows beyond them are padding throughout."""
    tokens, positions, segments = (np.zeros((shape.rows, shape.length), np.int32) for _ in range(3))
    system, targets = (np.zeros((shape.rows, shape.length), bool) for _ in range(2))
    for row, reading in enumerate(readings):
        size = len(reading.tokens)
        tokens[row, :size], positions[row, :size], segments[row, :size] = reading.tokens, np.arange(size), 1
        system[row, :size], targets[row, :size] = reading.system, reading.targets
    made = Batch(tokens, positions, segments, system, targets, slots(system, shape.span), slots(targets, shape.targets))
    return jax.tree.map(jnp.asarray, made)
