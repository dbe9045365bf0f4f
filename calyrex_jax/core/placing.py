"""Where activations and gathered weights lie on a mesh while a program runs.

with on_mesh(mesh):            # while a program is traced
    x = by_rows(x)             # rows over the data axes, whole otherwise

Left to itself, XLA's partitioner follows the weights: it cuts the residual stream along D and sums every product over all
devices. These few hints make it gather one layer's weights at a time instead. Without a mesh, or on one device, they do
nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from calyrex_jax.core.types import Array

ROWS, TENSOR = ("data", "fsdp"), "tensor"
VOCABULARY = ("tensor", "fsdp")
# the axis of a layer's leaf, without its layer axis, that the tensor axis cuts; the other axes are gathered for use
_CUT = {"w_q": 1, "w_k": 1, "w_v": 1, "w_o": 0, "w_gate": 1, "w_up": 1, "w_down": 0}


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager:
    """What is traced inside is placed on `mesh`."""
    if mesh is None or mesh.size == 1:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def on_several() -> bool:
    """Whether what is traced now is placed on several devices."""
    return bool(jax.sharding.get_abstract_mesh().shape)


def by_rows(x: Array) -> Array:
    """x [B, …] with its rows over the data and fsdp axes and every other axis whole; B must divide over them, or x stays."""
    return _placed(x, {0: ROWS})


def by_vocabulary(logits: Array) -> Array:
    """Logits [B, …, V], cut along V as the head is: the head stays where it lies, and the few states come to it."""
    whole = logits.shape[-1] % _parts(VOCABULARY) == 0
    rows, cut = (("data",), VOCABULARY) if whole else (ROWS, (TENSOR,))
    return _placed(logits, {0: rows, logits.ndim - 1: cut})


def gathered(path: str, leaf: Array) -> Array:
    """One layer's leaf at that path, gathered over the fsdp axis and cut by the tensor axis alone."""
    parts = [part for part in path.split("/") if part not in ("q", "scale", "offset")]
    name = parts[-1]
    return _placed(leaf, {_CUT[name]: (TENSOR,)} if name in _CUT else {})


def per_device(fn: Callable[..., Array], q: Array, k: Array, v: Array, *rows: Array) -> Array:
    """fn(q, k, v, *rows) on every device's own rows and heads: q [B, T, N, H], k and v [B, T, K, H], rows [B, T] each.

    For kernels, which the partitioner cannot cut. Heads lie over the tensor axis; where it has more parts than there are
    key/value heads, each of these is repeated on the parts that share it.
    """
    if not on_several():
        return fn(q, k, v, *rows)
    parts, heads, kv_heads = _parts((TENSOR,)), q.shape[2], k.shape[2]
    cut = heads % parts == 0 and (kv_heads % parts == 0 or parts % kv_heads == 0)
    if cut and kv_heads % parts:
        k, v = (jnp.repeat(array, parts // kv_heads, axis=2) for array in (k, v))
    split = ROWS if q.shape[0] % _parts(ROWS) == 0 else None
    whole, flat = P(split, None, TENSOR if cut else None, None), P(split, None)
    specs = (whole, whole, whole, *(flat for _ in rows))
    return jax.shard_map(fn, in_specs=specs, out_specs=whole, check_vma=False)(q, k, v, *rows)


def _parts(axes: tuple[str, ...]) -> int:
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[axis] for axis in axes) if shape else 1


def _placed(x: Array, cuts: dict[int, tuple[str, ...]]) -> Array:
    if not on_several():
        return x
    axes: list = [None] * x.ndim
    for dim, names in cuts.items():
        if x.shape[dim] % _parts(names) == 0:
            axes[dim] = names
    return jax.lax.with_sharding_constraint(x, P(*axes))
