"""The programs of a run with shapes for arrays: the very functions that train and generate run, ready to be compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from calyrex_jax.backbones.cache import init_cache
from calyrex_jax.backbones.decoder import stream_dtype
from calyrex_jax.core import trees
from calyrex_jax.core.types import Batch, Tree
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.sharding.rules import ADAPTER_RULES, batch_sharding, shardings
from calyrex_jax.training import flops
from calyrex_jax.training.optimizer import OptimizerConfig, make_optimizer
from calyrex_jax.training.step import init_state, jit_train_step, state_shardings


@dataclass(frozen=True)
class Program:
    """Something to compile.

    lower  traces it, for the platform in force
    parts  bytes on one device, exactly, of what it is handed or holds: weights, optimiser, cache, …
    least  bytes that its all-gathers must leave on a device; 0 where nothing has to be gathered, or none was counted
    """

    lower: Callable[[], Any]
    parts: dict[str, int]
    least: int = 0


def train_step(
    model: Model,
    mesh: Mesh,
    backbone: Tree,
    settings: OptimizerConfig,
    *,
    rows: int,
    length: int,
    span: int,
    accumulate: int,
    chunk: int,
    seed: int,
    cached: bool,
) -> Program:
    """One step on `rows` rows of `length` tokens, of which `span` are system text and all may be targets.

    backbone  shapes with shardings, as `build.abstract_weights` gives them
    cached    the states at the first boundary come from the prefix cache
    """
    adapters = _adapters(model)
    optimizer = make_optimizer(settings, adapters)
    placed = state_shardings(optimizer, adapters, mesh)
    state = _on(jax.eval_shape(lambda tree: init_state(optimizer, tree), adapters), placed)
    batch = _rows_on(flops.abstract_batch(model, rows, length, span, length, cached), mesh)
    step = jit_train_step(model, optimizer, placed, mesh, accumulate=accumulate, chunk=chunk, seed=seed)
    share = mesh.shape["data"] * mesh.shape["fsdp"]
    parts = {
        "weights": device_bytes(backbone),
        "adapters": device_bytes(state.trainable),
        "optimizer": device_bytes(state.opt_state),
        "batch": device_bytes(batch),
        # float32, of one chunk of positions; along the vocabulary they lie as the head does
        "logits": 4 * rows // accumulate // share * min(chunk, length) * model.spec.vocab_size // mesh.shape["tensor"],
    }
    return Program(lambda: step.lower(state, backbone, batch), parts, least_gathered(model, backbone, state.trainable))


def generation(
    model: Model, mesh: Mesh, backbone: Tree, *, rows: int, prompt: int, new_tokens: int, span: int, sampling: Any
) -> Program:
    """Reading `rows` prompts of `prompt` tokens and making `new_tokens` more: prefill and the decode loop in one program."""
    adapters = _adapters(model)
    adapters = _on(adapters, shardings(adapters, ADAPTER_RULES, mesh))
    batch = _rows_on(flops.abstract_batch(model, rows, prompt, span), mesh)
    params = {"backbone": backbone, "adapters": adapters}
    slots = prompt + model.bridge_slots + new_tokens
    cache = jax.eval_shape(lambda: init_cache(model.spec, rows, slots, stream_dtype(backbone)))
    heads = mesh.shape["tensor"] if model.spec.num_kv_heads % mesh.shape["tensor"] == 0 else 1
    share = mesh.shape["data"] * mesh.shape["fsdp"]
    parts = {
        "weights": device_bytes(backbone),
        "adapters": device_bytes(adapters),
        "cache": trees.num_bytes((cache.k, cache.v)) // share // heads,
        "logits": 4 * rows // share * model.spec.vocab_size // mesh.shape["tensor"],
    }
    return Program(lambda: loop.lower(model, params, batch, new_tokens, sampling, mesh), parts)


def least_gathered(model: Model, backbone: Tree, trainable: Tree) -> int:
    """Bytes a device gathers in a step at least: each cut layer once, and once more for the way back where there is one.

    Adapters travel in the residual stream's type, forward and back; what the tensor axis cuts stays cut.
    """
    layers, below = model.spec.num_layers, model.first_boundary
    frozen = sum(_gathered_bytes(leaf, leaf.dtype) for leaf in jax.tree.leaves(backbone["layers"]))
    trained = sum(_gathered_bytes(leaf, stream_dtype(backbone)) for leaf in jax.tree.leaves(trainable))
    return frozen * (2 * layers - below) // layers + 2 * trained


def _gathered_bytes(leaf: jax.ShapeDtypeStruct, dtype: Any) -> int:
    mesh, axes = leaf.sharding.mesh, [axis for axis in leaf.sharding.spec if axis is not None]
    if "fsdp" not in axes or mesh.shape["fsdp"] == 1:
        return 0
    return leaf.size * _bits(dtype) // 8 // (mesh.shape["tensor"] if "tensor" in axes else 1)


def _bits(dtype: Any) -> int:
    return jnp.iinfo(dtype).bits if jnp.issubdtype(dtype, jnp.integer) else 8 * dtype.itemsize


def device_bytes(tree: Tree) -> int:
    """Bytes of the largest share that a device has of leaves with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape)
        size = _bits(leaf.dtype)
        for side in shape:
            size *= side
        total += -(-size // 8)
    return total


def _adapters(model: Model) -> Tree:
    return jax.eval_shape(model.init_adapters, jax.random.key(0))


def _on(tree: Tree, placed: Tree) -> Tree:
    return jax.tree.map(lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where), tree, placed)


def _rows_on(batch: Batch, mesh: Mesh) -> Batch:
    rows = batch_sharding(mesh)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=rows), batch)
