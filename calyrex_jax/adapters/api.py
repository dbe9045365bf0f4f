"""Site and Adapter: all that a backbone and an adapter know of each other.

A boundary b means "after b decoder layers", 0 ≤ b ≤ L; boundary L lies before the final norm. The model walks from
boundary to boundary and hands the residual stream, wrapped in a `Site`, to every adapter that has a block there.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import flax.struct
import jax

from calyrex_jax.core.lowrank import Deltas
from calyrex_jax.core.types import Array, Tree


@flax.struct.dataclass
class Site:
    """The residual stream at one boundary and what describes its positions.

    x          [B, T, D] in the backbone's type
    outputs    [B, T, D], the output head's rows of the same positions' tokens: what, in the stream, predicts them
    positions  [B, T] int32, restarting at every segment
    segments   [B, T] int32, 0 in padding
    span       [B, S] int32 slots of the system span, -1 unused (empty while decoding: the adapter keeps its own state)
    boundary   static
    """

    x: Array
    outputs: Array
    positions: Array
    segments: Array
    span: Array
    boundary: int = flax.struct.field(pytree_node=False)


class Adapter(Protocol):
    """A trained module with blocks at some boundaries.

    Its parameters are `{"boundary_26": {leaf: array}, …}`; the methods below get one boundary's leaves. At
    initialisation every method returns `site.x` exactly.
    """

    name: str
    boundaries: tuple[int, ...]

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters for all boundaries, float32."""

    def apply(self, params: Tree, site: Site) -> jax.Array:
        """The adapted residual stream [B, T, D] of whole sequences."""

    def prefill(self, params: Tree, site: Site, capacity: int) -> tuple[jax.Array, Tree]:
        """The same, for a left-padded prompt, and the state that decoding needs; `capacity` is the cache's."""

    def decode(self, params: Tree, site: Site, state: Tree) -> tuple[jax.Array, Tree]:
        """The adapted stream of one new token a row, [B, 1, D], and the next state."""


@runtime_checkable
class LayerAdapter(Protocol):
    """A trained module that changes linear maps within layers, and has no block at a boundary."""

    name: str
    boundaries: tuple[int, ...]
    layers: range
    dropout: float

    def init(self, key: jax.Array) -> Tree:
        """Fresh parameters, float32, leaves stacked over `layers`; at initialisation they change nothing."""

    def deltas(self, params: Tree, key: Array | None = None) -> Deltas:
        """What the layers add to their products; `key` switches dropout on."""


def boundary_key(boundary: int) -> str:
    """The name of a boundary in parameter trees: `boundary_26`."""
    return f"boundary_{boundary}"
