"""Frozen weights in 8 or 4 bits: a leaf w becomes {"q": integers of w's shape, "scale": factors}, and int4 has offsets too.

    leaf = encode(w, (0,), "int8")                   # on the host, one layer at a time
    y = matmul(x, decoded(leaf, x.dtype))            # inside the scan, one layer at a time

int8   one factor an output channel, float32
int4   sixteen even steps; a factor and an offset, bfloat16, for 32 inputs of an output channel (5 bits a weight in all): the
       grid of llama.cpp's Q4_0 and Q4_1, whose files come in as they are
nf4    the 16 quantiles of a normal distribution, a bfloat16 factor for 64 inputs (4.25 bits; QLoRA, arXiv 2305.14314, app. E);
       keys, values and the mlp's way down, where errors cost most, stay int8

What a leaf is, its integers' type says: int8, int4, uint4 (nf4). Tables of the vocabulary, [V, D], have a factor a row and are
int8 in all 4-bit kinds. JAX keeps 4-bit types in 4 bits on TPU and GPU, and in a byte on CPUs.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from calyrex_jax.core import trees
from calyrex_jax.core.types import Array, Tree

KINDS = ("", "int8", "int4", "nf4")
BLOCKS = {"int4": 32, "nf4": 64}
_TENDER = ("w_k", "w_v", "w_down")
PARTS = ("q", "scale", "offset")
_Q_TYPES = {"int8": np.dtype(np.int8), "int4": np.dtype(ml_dtypes.int4), "nf4": np.dtype(ml_dtypes.uint4)}
_SCALE_TYPES = {"int8": np.dtype(np.float32), "int4": np.dtype(ml_dtypes.bfloat16), "nf4": np.dtype(ml_dtypes.bfloat16)}
_NF4 = np.asarray(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)
_MIDDLES = (_NF4[1:] + _NF4[:-1]) / 2


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a quantised leaf."""
    return isinstance(node, dict) and {"q", "scale"} <= node.keys()


def kind_of(path: str, kind: str) -> str:
    """How the backbone's leaf at `path` is kept under `kind`; "" is as it is.

    >>> kind_of("layers/mlp/w_up", "nf4"), kind_of("head/w", "nf4"), kind_of("head/w", "int8")
    ('nf4', 'int8', '')
    """
    if re.fullmatch(r"layers/(attn|mlp)/w_\w+", path):
        return "int8" if kind == "nf4" and path.rsplit("/", 1)[1] in _TENDER else kind
    return "int8" if kind in ("int4", "nf4") and path in ("embed/tokens", "head/w") else ""


def input_axes(path: str) -> tuple[int, ...]:
    """The axes of a leaf (without its layer axis) that its map sums over; of a table the width."""
    if not path.startswith("layers/"):
        return (1,)
    return (0, 1) if path.endswith("w_o") else (0,)


def abstract(tree: Tree, kind: str) -> Tree:
    """A backbone's shapes under `kind`: `trees.map_with_path` of `abstract_leaf`."""
    return trees.unflatten({path: abstract_leaf(path, leaf, kind) for path, leaf in trees.flatten(tree).items()})


def abstract_leaf(path: str, leaf: Any, kind: str) -> Any:
    """The shapes that `encode` gives for the leaf at `path`, its layer axis in front; the leaf itself where it is kept."""
    if not (own := kind_of(path, kind)):
        return leaf
    layered = path.startswith("layers/")
    shape = list(leaf.shape)
    for axis in input_axes(path):
        shape[axis + layered] = 1
    if own != "int8":
        for axis in input_axes(path):
            shape[axis + layered] = leaf.shape[axis + layered]
        last = input_axes(path)[-1] + layered
        shape[last] = leaf.shape[last] // block_size(leaf.shape[last], own)
    factors = jax.ShapeDtypeStruct(tuple(shape), _SCALE_TYPES[own])
    made = {"q": jax.ShapeDtypeStruct(leaf.shape, _Q_TYPES[own]), "scale": factors}
    return made | ({"offset": factors} if own == "int4" else {})


def block_size(width: int, kind: str) -> int:
    """Inputs that share a factor: the largest divisor of `width` up to the kind's block."""
    return next(size for size in range(min(BLOCKS[kind], width), 0, -1) if width % size == 0)


def encode(w: np.ndarray, axes: tuple[int, ...], kind: str) -> dict[str, np.ndarray]:
    """The parts of one layer's w, float32; axes are those that its map sums over, neighbours.

    >>> encode(np.asarray([[1.0], [-2.0]], np.float32), (0,), "int8")["q"].tolist()
    [[64], [-127]]
    """
    if kind == "int8":
        scale = np.abs(w).max(axis=axes, keepdims=True) / 127
        return {"q": np.rint(w / _safe(scale)).astype(np.int8), "scale": scale.astype(np.float32)}
    last = axes[-1]
    blocks = w.reshape(*w.shape[:last], -1, block_size(w.shape[last], kind), *w.shape[last + 1 :])
    made = (_nf4 if kind == "nf4" else _int4)(blocks, last + 1)
    levels = made.pop("q").reshape(w.shape).astype(_Q_TYPES[kind])
    return {"q": levels} | {name: part.squeeze(last + 1) for name, part in made.items()}


def _safe(scale: np.ndarray) -> np.ndarray:
    return np.where(scale == 0, 1, scale)


def _nf4(blocks: np.ndarray, axis: int) -> dict[str, np.ndarray]:
    scale = np.abs(blocks).max(axis=axis, keepdims=True).astype(ml_dtypes.bfloat16)
    return {"q": np.searchsorted(_MIDDLES, blocks / _safe(scale.astype(np.float32))).astype(np.uint8), "scale": scale}


def _int4(blocks: np.ndarray, axis: int) -> dict[str, np.ndarray]:
    low, high = blocks.min(axis=axis, keepdims=True), blocks.max(axis=axis, keepdims=True)
    scale = ((high - low) / 15).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    # of step 0 of -8 to 7: near the middle of the block, where bfloat16 is fine
    offset = (low + 8 * wide).astype(ml_dtypes.bfloat16)
    levels = np.clip(np.rint((blocks - offset.astype(np.float32)) / _safe(wide)), -8, 7)
    return {"q": levels.astype(np.int8), "scale": scale, "offset": offset}


def decoded(node: Any, dtype: Any) -> jax.Array:
    """A quantised leaf as an array of `dtype`, the products in float32 before one rounding; any other leaf as it is."""
    if not is_quantized(node):
        return node
    q = node["q"]
    values = _quantile(q) if q.dtype == jnp.uint4 else q.astype(jnp.float32)
    made = values * _spread(node["scale"], q.shape)
    if "offset" in node:
        made = made + _spread(node["offset"], q.shape)
    return made.astype(dtype)


def _spread(factors: Array, shape: tuple[int, ...]) -> jax.Array:
    """Factors in float32, repeated along the axis that has fewer of them than `shape` (one is left to broadcasting)."""
    wide = factors.astype(jnp.float32)
    for axis, (whole, parts) in enumerate(zip(shape, factors.shape, strict=True)):
        if 1 < parts < whole:
            wide = jnp.repeat(wide, whole // parts, axis=axis, total_repeat_length=whole)
    return wide


def _quantile(q: Array) -> jax.Array:
    """_NF4[q] by four choices a number: a lookup would be a gather, which TPUs are slow at."""
    q = q.astype(jnp.int32)
    values: list[Any] = [jnp.float32(value) for value in _NF4]
    for bit in range(4):
        chosen = (q >> bit) & 1 == 1
        values = [jnp.where(chosen, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def table_rows(table: Any, ids: Array, dtype: Any) -> jax.Array:
    """Rows of a [V, D] table, which may be quantised: ids [B, T] -> [B, T, D]; ids beyond it are clipped."""
    if not is_quantized(table):
        return jnp.take(table, ids, axis=0, mode="clip")
    q, scale = (jnp.take(table[name], ids, axis=0, mode="clip") for name in ("q", "scale"))
    return (q.astype(jnp.float32) * scale).astype(dtype)


def table_size(table: Any) -> int:
    """V of a [V, D] table."""
    return (table["q"] if is_quantized(table) else table).shape[0]


def table_logits(x: Array, table: Any) -> jax.Array:
    """x [..., D] times a table [V, D]: float32 [..., V]. The factors of a quantised table come after the product."""
    if not is_quantized(table):
        return jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)
    # int8 is exact in bfloat16
    made = jnp.einsum("...d,vd->...v", x, table["q"].astype(x.dtype), preferred_element_type=jnp.float32)
    return made * table["scale"][:, 0]


def table_states(slopes: Array, table: Any, dtype: Any) -> jax.Array:
    """The transpose of `table_logits`: slopes [..., V] to float32 [..., D], multiplied in `dtype`."""
    weights = table
    if is_quantized(table):
        slopes, weights = slopes * table["scale"][:, 0], table["q"].astype(dtype)
    return jnp.einsum("...v,vd->...d", slopes.astype(weights.dtype), weights, preferred_element_type=jnp.float32)
