"""The pure train step: gradients of the trainable subtree alone, one global average, non-finite steps skipped.

state = init_state(optimizer, adapters)
step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
state, metrics = step(state, backbone, batch)
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from calyrex_jax.backbones import decoder
from calyrex_jax.core.placing import on_mesh
from calyrex_jax.core.types import Array, Batch, Tree
from calyrex_jax.model import Model
from calyrex_jax.sharding.rules import ADAPTER_RULES, replicated, shardings
from calyrex_jax.training.losses import compacted, cross_entropy, distilled, shifted


@flax.struct.dataclass
class TrainState:
    """step int32; trainable {adapter: …} float32; opt_state of the optimiser; skipped int32, non-finite steps in a row."""

    step: Array
    trainable: Tree
    opt_state: Tree
    skipped: Array


def init_state(optimizer: optax.GradientTransformation, trainable: Tree) -> TrainState:
    """The state before the first step."""
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, trainable, optimizer.init(trainable), zero)


def advanced(optimizer: optax.GradientTransformation, state: TrainState, grads: Tree, finite: Array) -> TrainState:
    """The state after one update; where not `finite` (a scalar bool) only its counts change."""
    updates, opt_state = optimizer.update(grads, state.opt_state, state.trainable)
    trainable = optax.apply_updates(state.trainable, updates)
    # optax.apply_if_finite commits a NaN after its limit; here a non-finite step never touches the state
    keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
    return TrainState(
        step=state.step + 1,
        trainable=keep(trainable, state.trainable),
        opt_state=keep(opt_state, state.opt_state),
        skipped=jnp.where(finite, 0, state.skipped + 1),
    )


def state_shardings(optimizer: optax.GradientTransformation, adapters: Tree, mesh: Mesh) -> TrainState:
    """Where a train state lies, NamedSharding by leaf: optimiser moments lie where their parameters lie."""
    leaves = shardings(adapters, ADAPTER_RULES, mesh)
    whole = replicated(mesh)
    shapes = jax.eval_shape(lambda tree: init_state(optimizer, tree), adapters)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, where: moment if isinstance(moment, optax.MaskedNode) else where,  # a frozen adapter has none
        shapes.opt_state,
        leaves,
        transform_non_params=lambda _: whole,
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )
    return TrainState(step=whole, trainable=leaves, opt_state=moments, skipped=whole)


def loss_sums(
    model: Model, backbone: Tree, trainable: Tree, batch: Batch, prefix: Array, teacher, chunk: int, compact: bool, key=None
):
    """The summed loss over the batch's targets and their number; `teacher` are frozen final states [B, T, D] or None."""
    x = model.hidden({"backbone": backbone, "adapters": trainable}, batch, prefix, key)
    parts = shifted(x, batch)
    if teacher is not None:
        parts = (*parts, shifted(teacher, batch)[0], distilled(batch))
    if compact:
        chunk *= x.shape[0]
        parts = compacted(*parts)
    states, labels, weights, *distillation = parts
    return cross_entropy(states, decoder.head_matrix(backbone), labels, weights, chunk, *distillation)


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    chunk: int = 128,
    compact: bool = False,
    seed: int = 0,
):
    """`step(state, backbone, batch) -> (state, metrics)`; jit it with `state` donated.

    accumulate  microbatches a step: rows are split evenly; sums of losses and gradients are divided by the global
                number of targets once, so that short rows weigh no more than long ones
    chunk       positions a row through the output head at a time
    seed        of dropout, whose key is folded from it, the step and the microbatch
    compact     targets of all rows go through the head side by side; for a single device (`losses.compacted`)
    metrics     loss (mean over targets), grad_norm, tokens (real ones), targets, skipped (non-finite steps in a row)
    """

    def gradients(trainable: Tree, backbone: Tree, batch: Batch, key: Array | None):
        # outside the differentiated function: the layers below the first boundary leave no residuals
        prefix = model.prefix(backbone, batch) if batch.prefix is None else batch.prefix
        teacher = None if batch.distill is None else model.frozen(backbone, batch, prefix)

        def objective(leaves):
            return loss_sums(model, backbone, leaves, batch, prefix, teacher, chunk, compact, key)

        (loss, targets), grads = jax.value_and_grad(objective, has_aux=True)(trainable)
        return loss, targets, grads

    def accumulated(trainable: Tree, backbone: Tree, batch: Batch, key: Array | None):
        if accumulate == 1:
            return gradients(trainable, backbone, batch, key)
        # rows r, r + n, r + 2n … make a microbatch: on a sharded batch every device keeps its own rows
        split = jax.tree.map(lambda a: jnp.moveaxis(a.reshape(-1, accumulate, *a.shape[1:]), 1, 0), batch)
        zeros = jax.tree.map(jnp.zeros_like, trainable)

        def body(carry, part):
            micro, number = part
            own = None if key is None else jax.random.fold_in(key, number)
            return jax.tree.map(jnp.add, carry, gradients(trainable, backbone, micro, own)), None

        start = (jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32), zeros)
        return jax.lax.scan(body, start, (split, jnp.arange(accumulate)))[0]

    def step(state: TrainState, backbone: Tree, batch: Batch):
        key = jax.random.fold_in(jax.random.key(seed), state.step) if model.dropout else None
        loss, targets, grads = accumulated(state.trainable, backbone, batch, key)
        scale = 1.0 / jnp.maximum(targets, 1.0)
        loss, grads = loss * scale, jax.tree.map(lambda g: g * scale, grads)
        norm = optax.global_norm(grads)
        state = advanced(optimizer, state, grads, jnp.isfinite(loss) & jnp.isfinite(norm))
        metrics = {
            "loss": loss,
            "grad_norm": norm,
            "tokens": (batch.segments > 0).sum(),
            "targets": targets,
            "skipped": state.skipped,
        }
        return state, metrics

    return step


def jit_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    placed: TrainState,
    mesh: Mesh,
    *,
    accumulate: int,
    chunk: int,
    seed: int,
):
    """`make_train_step` as a run of `mesh` has it and as a plan compiles it; placed is what `state_shardings` gave."""
    made = make_train_step(model, optimizer, accumulate=accumulate, chunk=chunk, compact=mesh.size == 1, seed=seed)

    def step(state: TrainState, backbone: Tree, batch: Batch):
        with on_mesh(mesh):
            return made(state, backbone, batch)

    return jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated(mesh)))
