"""Frozen weights in 8 or 4 bits: a leaf w becomes {"q": integers of w's shape, "scale": factors}.

    leaf = encode(w, inputs=1, kind="int8")          # on the host, one layer at a time
    y = matmul(x, decoded(leaf, x.dtype))            # inside the scan, one layer at a time

int8   one factor an output channel, float32
int4   whole numbers from -8 to 7, one bfloat16 factor for 64 inputs of an output channel
nf4    the 16 quantiles of a normal distribution, likewise (QLoRA, arXiv 2305.14314, appendix E)

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
BLOCK = 64
_Q_TYPES = {"int8": np.dtype(np.int8), "int4": np.dtype(ml_dtypes.int4), "nf4": np.dtype(ml_dtypes.uint4)}
_SCALE_TYPES = {"int8": np.dtype(np.float32), "int4": np.dtype(ml_dtypes.bfloat16), "nf4": np.dtype(ml_dtypes.bfloat16)}
_NF4 = np.asarray(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0]
    + [0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0],
    np.float32,
)
_MIDDLES = (_NF4[1:] + _NF4[:-1]) / 2
_ROUNDINGS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of a block's largest weight: what is clipped against what is rounded


def is_quantized(node: Any) -> bool:
    """Whether a node of a tree is a quantised leaf."""
    return isinstance(node, dict) and node.keys() == {"q", "scale"}


def kind_of(path: str, kind: str) -> str:
    """How the backbone's leaf at `path` is kept under `kind`; "" is as it is.

    >>> kind_of("layers/mlp/w_up", "nf4"), kind_of("head/w", "nf4"), kind_of("head/w", "int8")
    ('nf4', 'int8', '')
    """
    if re.fullmatch(r"layers/(attn|mlp)/w_\w+", path):
        return kind
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
        last = input_axes(path)[-1] + layered
        for axis in input_axes(path):
            shape[axis + layered] = leaf.shape[axis + layered]
        shape[last] = leaf.shape[last] // block_size(leaf.shape[last])
    return {
        "q": jax.ShapeDtypeStruct(leaf.shape, _Q_TYPES[own]),
        "scale": jax.ShapeDtypeStruct(tuple(shape), _SCALE_TYPES[own]),
    }


def block_size(width: int) -> int:
    """Inputs that share a factor: the largest divisor of `width` up to 64."""
    return next(size for size in range(min(BLOCK, width), 0, -1) if width % size == 0)


def encode(w: np.ndarray, axes: tuple[int, ...], kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(q, scale) of one layer's w, float32; axes are those that its map sums over, neighbours.

    int4 picks, for each block, the factor with the least squared error among a few. A block of zeros stays zero.
    """
    if kind == "int8":
        scale = np.abs(w).max(axis=axes, keepdims=True) / 127
        q = np.rint(w / np.where(scale == 0, 1, scale))
        return q.astype(np.int8), scale.astype(np.float32)
    last = axes[-1]
    size = block_size(w.shape[last])
    blocks = w.reshape(*w.shape[:last], -1, size, *w.shape[last + 1 :])
    levels, scale = (_nf4 if kind == "nf4" else _int4)(blocks, last + 1)
    return levels.reshape(w.shape).astype(_Q_TYPES[kind]), scale.squeeze(last + 1)


def _nf4(blocks: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(blocks).max(axis=axis, keepdims=True).astype(ml_dtypes.bfloat16)
    wide = scale.astype(np.float32)
    return np.searchsorted(_MIDDLES, blocks / np.where(wide == 0, 1, wide)).astype(np.uint8), scale


def _int4(blocks: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = blocks.min(axis=axis, keepdims=True), blocks.max(axis=axis, keepdims=True)
    # the side that reaches farther has the eighth step
    farthest = np.where(-low > high, low, high) / -8
    best = levels = scale = None
    for part in _ROUNDINGS:
        tried = (farthest * part).astype(ml_dtypes.bfloat16)
        wide = tried.astype(np.float32)
        rounded = np.clip(np.rint(blocks / np.where(wide == 0, 1, wide)), -8, 7)
        error = np.square(rounded * wide - blocks).sum(axis=axis, keepdims=True)
        if best is None:
            best, levels, scale = error, rounded, tried
            continue
        better = error < best
        best, levels, scale = (
            np.where(better, error, best),
            np.where(better, rounded, levels),
            np.where(better, tried, scale),
        )
    return levels.astype(np.int8), scale


def decoded(node: Any, dtype: Any) -> jax.Array:
    """A quantised leaf as an array of `dtype`, the products in float32 before one rounding; any other leaf as it is."""
    if not is_quantized(node):
        return node
    q, scale = node["q"], node["scale"].astype(jnp.float32)
    values = _quantile(q) if q.dtype == jnp.uint4 else q.astype(jnp.float32)
    for axis, (whole, parts) in enumerate(zip(q.shape, scale.shape, strict=True)):
        if 1 < parts < whole:  # blocks of this axis
            split = values.reshape(*q.shape[:axis], parts, whole // parts, *q.shape[axis + 1 :])
            return (split * jnp.expand_dims(scale, axis + 1)).reshape(q.shape).astype(dtype)
    return (values * scale).astype(dtype)


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
