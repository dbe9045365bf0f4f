"""Low-rank changes of linear maps: what LoRA is made of, how a layer adds it, and how it is scaled.

A kind of map is named by its leaf in a layer, such as `attn/w_q`; `attn/w_qkv` stands for the three maps of a family that
stores them as one (GPT-2): they share `a`, and `b` has a third for each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod, sqrt

import flax.struct
import jax
import jax.numpy as jnp

from calyrex_jax.core.numerics import matmul
from calyrex_jax.core.trees import flatten
from calyrex_jax.core.types import Array, Tree

KINDS = ("attn/w_qkv", "attn/w_q", "attn/w_k", "attn/w_v", "attn/w_o", "mlp/w_gate", "mlp/w_up", "mlp/w_down")
FUSED = "attn/w_qkv"
_THIRDS = ("attn/w_q", "attn/w_k", "attn/w_v")


@dataclass(frozen=True)
class LowRank:
    """w + scale · a b for the maps `ranks` of the layers first … stop - 1; scale = alpha / rank, or alpha / √rank (rslora).

    ranks    ((kind, rank), …), in the order of KINDS
    dropout  on the input of a, in training
    """

    ranks: tuple[tuple[str, int], ...]
    alpha: float
    first: int
    stop: int
    rslora: bool = False
    dropout: float = 0.0

    def scale(self, kind: str) -> float:
        """What a b is multiplied by."""
        rank = dict(self.ranks)[kind]
        return self.alpha / (sqrt(rank) if self.rslora else rank)


def map_shapes(layers: Tree, fused: bool) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{kind: (input shape, output shape)} of a stack of layers, in the order of KINDS; `fused`: q, k and v are one map.

    >>> import numpy as np
    >>> map_shapes({"attn": {"w_o": np.zeros((2, 9, 64, 576))}}, fused=False)
    {'attn/w_o': ((9, 64), (576,))}
    """
    leaves = flatten(layers)
    found = {}
    for kind in KINDS:
        if kind == FUSED and fused:
            inputs, outputs = _cut(kind, leaves["attn/w_q"].shape[1:])
            found[kind] = inputs, (3, *outputs)
        elif kind in leaves and not (fused and kind in _THIRDS):
            found[kind] = _cut(kind, leaves[kind].shape[1:])
    return found


def _cut(kind: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    inputs = 2 if kind.endswith("w_o") else 1
    return tuple(shape[:inputs]), tuple(shape[inputs:])


def rank_parameters(shapes: dict, kind: str) -> int:
    """Parameters that one more rank of a kind costs in one layer."""
    inputs, outputs = shapes[kind]
    return prod(inputs) + prod(outputs)


@flax.struct.dataclass
class Deltas:
    """The low-rank leaves of a run and what describes them.

    leaves  {"attn": {"w_q": {"a": [layers, in…, r], "b": [layers, r, out…]}}}, the layers first … stop - 1
    key     of dropout; None: none
    """

    leaves: Tree
    key: Array | None
    low_rank: LowRank = flax.struct.field(pytree_node=False)

    def within(self, start: int, stop: int) -> Deltas | None:
        """The share of layers start … stop - 1; None where they have no changes. ValueError where only some of them have."""
        first, last = self.low_rank.first, self.low_rank.stop
        if stop <= first or last <= start:
            return None
        if start < first or last < stop:
            raise ValueError(f"layers {start} to {stop - 1} are not all in {first} to {last - 1}; cut the run there")
        if (start, stop) == (first, last):
            return self
        leaves = jax.tree.map(lambda leaf: leaf[start - first : stop - first], self.leaves)
        return self.replace(leaves=leaves, low_rank=replace(self.low_rank, first=start, stop=stop))

    def at(self, layer: Array | int, leaves: Tree | None = None) -> LayerDeltas:
        """One layer's share; `leaves` are its own, where a scan has taken them from the stack already."""
        if leaves is None:
            leaves = jax.tree.map(lambda leaf: leaf[layer - self.low_rank.first], self.leaves)
        return LayerDeltas(leaves, None if self.key is None else jax.random.fold_in(self.key, layer), self.low_rank)


@flax.struct.dataclass
class LayerDeltas:
    """`Deltas` of one layer, without the layer axis."""

    leaves: Tree
    key: Array | None
    low_rank: LowRank = flax.struct.field(pytree_node=False)

    def added(self, name: str, x: Array, contract: int = 1) -> jax.Array | None:
        """scale · (x a) b for the map `name`, float32 [batch…, out…]; None where it has no change."""
        ranks = dict(self.low_rank.ranks)
        kind = FUSED if FUSED in ranks and name in _THIRDS else name
        if kind not in ranks:
            return None
        room, leaf = kind.split("/")
        a, b = self.leaves[room][leaf]["a"], self.leaves[room][leaf]["b"]
        if kind == FUSED:
            b = b[:, _THIRDS.index(name)]
        if self.key is not None:
            keep = 1.0 - self.low_rank.dropout
            # one key a kind: the thirds of a fused map see the same input
            mask = jax.random.bernoulli(jax.random.fold_in(self.key, KINDS.index(kind)), keep, x.shape)
            x = jnp.where(mask, x / keep, 0).astype(x.dtype)
        return self.low_rank.scale(kind) * matmul(matmul(x, a, contract), b).astype(jnp.float32)
