"""LoRA: low-rank changes of the backbone's linear maps (arXiv 2106.09685; scaled by √r: rsLoRA, arXiv 2312.03732).

    y = x W + scale · (x A) B

A starts as PEFT's does (uniform within ±1/√inputs), B at zero, so that the model starts as the backbone. Unlike blocks at
boundaries it works within layers: `Lora.deltas` is what the decoder adds, and layers from the first changed one on are no
longer frozen arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import ceil, prod

import jax
import jax.numpy as jnp

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.lowrank import FUSED, KINDS, Deltas, LowRank, rank_parameters
from calyrex_jax.core.numerics import stored
from calyrex_jax.core.quantized import is_quantized
from calyrex_jax.core.types import Array, Tree

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
LAYER_PRESETS = ("all", "early8th", "mid8th", "late4th", "late8th", "last")


@dataclass(frozen=True)
class Lora:
    """The LoRA adapter. `shapes` are the maps of one layer (`lowrank.map_shapes`).

    Raises UserError for a rank, alpha or dropout out of range, or layers that the backbone does not have.
    """

    low_rank: LowRank
    shapes: tuple[tuple[str, tuple[tuple[int, ...], tuple[int, ...]]], ...]
    name: str = "lora"
    boundaries: tuple[int, ...] = field(default=(), init=False)  # it has no block there

    def __post_init__(self):
        checks = {
            "rank": (all(rank >= 1 for _, rank in self.low_rank.ranks), "at least 1 for every map"),
            "alpha": (self.low_rank.alpha > 0, "above 0"),
            "dropout": (0 <= self.low_rank.dropout < 1, "at least 0 and below 1"),
            "targets": (bool(self.low_rank.ranks), "at least one map"),
        }
        for name, (good, expected) in checks.items():
            if not good:
                raise UserError(f"lora.{name}: got {getattr(self.low_rank, name, ())!r}, expected {expected}")

    @property
    def layers(self) -> range:
        """The layers whose maps it changes."""
        return range(self.low_rank.first, self.low_rank.stop)

    @property
    def dropout(self) -> float:
        """On the input of A, in training."""
        return self.low_rank.dropout

    def init(self, key: jax.Array) -> Tree:
        """{"attn": {"w_q": {"a": [layers, in…, r], "b": [layers, r, out…]}, …}, …}, float32."""
        shapes, count, tree = dict(self.shapes), len(self.layers), {}
        for kind, rank in self.low_rank.ranks:
            inputs, outputs = shapes[kind]
            room, leaf = kind.split("/")
            bound = prod(inputs) ** -0.5
            own = jax.random.fold_in(key, KINDS.index(kind))
            a = jax.random.uniform(own, (count, *inputs, rank), jnp.float32, -bound, bound)
            tree.setdefault(room, {})[leaf] = {"a": a, "b": jnp.zeros((count, rank, *outputs), jnp.float32)}
        return tree

    def deltas(self, params: Tree, key: Array | None = None) -> Deltas:
        """What the decoder's layers add; `key` switches dropout on."""
        return Deltas(params, key if self.low_rank.dropout else None, self.low_rank)


def matched_ranks(budget: int, shapes: Shapes, kinds: Sequence[str], layers: int) -> dict[str, int]:
    """{kind: rank} with which the maps `kinds` of `layers` layers have `budget` parameters, to within 1 %.

    One rank r for all where that suffices. Else some kinds take r + 1: the first ones in the order of `lowrank.KINDS`, or, where
    no number of them comes within 1 %, the set of kinds that comes nearest. Raises UserError where nothing does.
    """
    costs = {kind: layers * rank_parameters(shapes, kind) for kind in kinds}
    whole = sum(costs.values())

    def miss(total: int) -> float:
        return abs(total / budget - 1)

    rank = max(round(budget / whole), 1)
    if miss(rank * whole) <= 0.01:
        return dict.fromkeys(kinds, rank)
    rank = budget // whole
    prefixes = [tuple(kinds[:n]) for n in range(1, len(kinds))]
    subsets = [chosen for n in range(1, len(kinds)) for chosen in combinations(kinds, n)]
    for sets in (prefixes, subsets):
        if rank and sets:
            more = min(sets, key=lambda chosen: miss(rank * whole + sum(costs[kind] for kind in chosen)))
            if miss(rank * whole + sum(costs[kind] for kind in more)) <= 0.01:
                return {kind: rank + (kind in more) for kind in kinds}
    raise UserError(
        f"lora.rank: no rank gives CAL's {budget:,} parameters within 1 % (one rank of these maps has {whole:,}); set "
        "config.lora.rank, or name other config.lora.targets or config.lora.layers"
    )


def layer_range(text: str, num_layers: int) -> range:
    """The layers that `lora.layers` names: a preset, one layer, or first and last.

    >>> layer_range("late8th", 30), layer_range("22-29", 30), layer_range("all", 30)
    (range(26, 30), range(22, 30), range(0, 30))
    """
    eighth, stripped = ceil(num_layers / 8), text.strip()
    middle = num_layers // 2 - eighth // 2
    presets = {
        "all": range(num_layers),
        "early8th": range(eighth),
        "mid8th": range(middle, middle + eighth),
        "late4th": range(num_layers - ceil(num_layers / 4), num_layers),
        "late8th": range(num_layers - eighth, num_layers),
        "last": range(num_layers - 1, num_layers),
    }
    if stripped in presets:
        return presets[stripped]
    first, dash, last = stripped.partition("-")
    try:
        found = range(int(first), int(last if dash else first) + 1)
    except ValueError:
        raise UserError(
            f"lora.layers: {text!r} is neither a preset nor a range; use one of {', '.join(LAYER_PRESETS)}, or a range such "
            f"as '{num_layers // 2}-{num_layers - 1}'"
        ) from None
    if not found or found.start < 0 or found.stop > num_layers:
        raise UserError(f"lora.layers: {text!r} names no layers of this backbone; they run from 0 to {num_layers - 1}")
    return found


def merge(low_rank: LowRank, backbone: Tree, leaves: Tree) -> Tree:
    """The backbone with LoRA's changes added to its weights, in their own type; what is given stays as it is.

    The product is float32, and added before the one rounding. The layers may be `numerics.stored`, and then are again.
    """
    if is_quantized(backbone["layers"]["attn"]["w_q"]):
        raise UserError(
            "backbone.quantize: LoRA cannot be merged into quantised weights; leave backbone.quantize empty to merge"
        )
    layers = {room: dict(part) for room, part in backbone["layers"].items()}
    for kind, _ in low_rank.ranks:
        room, leaf = kind.split("/")
        a, b = leaves[room][leaf]["a"], leaves[room][leaf]["b"]
        parts = {f"w_{x}": b[:, :, i] for i, x in enumerate("qkv")} if kind == FUSED else {leaf: b}
        for name, part in parts.items():
            layers[room][name] = _merged(low_rank, low_rank.scale(kind), layers[room][name], a, part)
    return backbone | {"layers": layers}


def _merged(low_rank: LowRank, scale: float, w: Array, a: Array, b: Array) -> jax.Array:
    bits = w.dtype == jnp.uint16
    w = jax.lax.bitcast_convert_type(w, jnp.bfloat16) if bits else jnp.asarray(w)
    change = scale * jax.vmap(lambda a, b: jnp.tensordot(a, b, 1))(a, b)
    here = w[low_rank.first : low_rank.stop].astype(jnp.float32) + change
    w = w.at[low_rank.first : low_rank.stop].set(here.astype(w.dtype))
    return stored(w) if bits else w
