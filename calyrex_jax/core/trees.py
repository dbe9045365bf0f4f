"""Parameter trees by path: nested dictionaries whose leaves are named `layers/attn/w_q`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import jax
import numpy as np

from calyrex_jax.core.types import Tree


def flatten(tree: Tree) -> dict[str, jax.Array]:
    """{path: leaf}, paths joined by "/", in sorted order.

    >>> flatten({"a": {"b": 1}})
    {'a/b': 1}
    """
    found: dict[str, jax.Array] = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        found["/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)] = leaf
    return dict(sorted(found.items()))


def unflatten(leaves: dict[str, jax.Array]) -> Tree:
    """The inverse of `flatten` for trees of dictionaries."""
    tree: Tree = {}
    for path, leaf in leaves.items():
        node = tree
        *parents, last = path.split("/")
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = leaf
    return tree


def map_with_path(fn: Callable[[str, jax.Array], object], tree: Tree) -> Tree:
    """`fn(path, leaf)` at every leaf."""
    return unflatten({path: fn(path, leaf) for path, leaf in flatten(tree).items()})


def count(tree: Tree) -> int:
    """Number of scalar parameters, counted logically whatever their storage: the factors of quantised leaves do not count."""
    leaves = flatten(tree)
    quantised = [path.removesuffix("/q") for path in leaves if path.endswith("/q")]
    factors = {f"{path}/{part}" for path in quantised for part in ("scale", "offset")}
    return sum(int(np.prod(leaf.shape)) for path, leaf in leaves.items() if path not in factors)


def num_bytes(tree: Tree) -> int:
    """Bytes that the leaves take in memory."""
    return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def match(expected: Tree, got: Tree, what: str) -> list[str]:
    """Every difference in names and shapes, one line each; empty where the trees agree.

    >>> match({"a": np.zeros(2)}, {"b": np.zeros(2)}, "checkpoint")
    ['checkpoint lacks a', 'checkpoint has unexpected b']
    """
    want, have = flatten(expected), flatten(got)
    lines = [f"{what} lacks {path}" for path in want if path not in have]
    lines += [f"{what} has unexpected {path}" for path in have if path not in want]
    lines += [
        f"{what}: {path} has shape {tuple(have[path].shape)}, expected {tuple(want[path].shape)}"
        for path in want
        if path in have and tuple(have[path].shape) != tuple(want[path].shape)
    ]
    return lines


def checksum(tree: Tree, paths: Iterable[str] | None = None) -> str:
    """SHA-256 over names, types, shapes and bytes of all leaves (or of `paths`): equal exactly where the trees are bit-identical.

    Leaves are brought to the host one at a time; a leaf that this process cannot address in whole is hashed by the
    shards that it holds.
    """
    digest = hashlib.sha256()
    leaves = flatten(tree)
    for path in leaves if paths is None else sorted(paths):
        leaf = leaves[path]
        digest.update(f"{path}:{leaf.dtype}:{tuple(leaf.shape)}".encode())
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            for shard in sorted(leaf.addressable_shards, key=lambda s: str(s.index)):
                if shard.replica_id == 0:
                    digest.update(str(shard.index).encode())
                    digest.update(np.ascontiguousarray(shard.data).view(np.uint8).data)
        else:
            digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
