"""Inference-time intervention (ITI, Li et al., arXiv 2306.03341): a constant shift of some heads' outputs, a steering baseline.

    attention's output of head n -> itself + α σ θ          before the output projection, at the K heads whose probes are best

θ is the unit direction from harmful to safe, σ the spread of the heads' outputs along it. As the projection is linear, all
of a layer's shifts are one vector of the model's width, which is what is kept. It acts on every token, as in the authors'
edited models. `training.iti` computes it; strength 0 changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array, Tree

_PLACE = "attn/w_o"


@flax.struct.dataclass
class Shifts:
    """What layers first … first + len - 1 add behind their output projections; in the place of lowrank.Deltas.

    leaves  [layers, D] float32
    """

    leaves: Array
    first: int = flax.struct.field(pytree_node=False, default=0)

    def within(self, start: int, stop: int) -> Shifts:
        """The share of layers start … stop - 1."""
        return Shifts(self.leaves[start - self.first : stop - self.first], start)

    def at(self, layer: Array | int, leaves: Array | None = None) -> LayerShift:
        """One layer's share; `leaves` is its own, where a scan has taken it from the stack already."""
        return LayerShift(self.leaves[layer - self.first] if leaves is None else leaves)


@flax.struct.dataclass
class LayerShift:
    """One layer's vector [D]."""

    shift: Array

    def added(self, name: str, x: Array, contract: int = 1) -> Array | None:
        """What is added to the map `name`'s product, float32; None but for attention's output projection."""
        return self.shift if name == _PLACE else None


@dataclass(frozen=True)
class Iti:
    """The intervention on a backbone of `layers`; strength is α."""

    layers: range
    embed_dim: int
    strength: float
    boundaries: tuple[int, ...] = ()
    dropout: float = 0.0
    name: str = "iti"

    def __post_init__(self):
        if self.strength < 0:
            raise UserError(f"config.iti.strength: got {self.strength}, expected 0 (no change) or more")

    def init(self, key: jax.Array) -> Tree:
        """No shift yet: {"shift": [layers, D]} float32."""
        return {"shift": jnp.zeros((len(self.layers), self.embed_dim), jnp.float32)}

    def deltas(self, params: Tree, key: Array | None = None) -> Shifts:
        """The shifts at the adapter's strength."""
        return Shifts(self.strength * params["shift"])
