"""Stage 3 of SVGT's curriculum: the bridge alone, trained through the layers above l* on safe replies.

step = jax.jit(make_bridge_step(model, optimizer, BridgeLoss()), donate_argnums=0)
state, metrics = step(state, params, dialogue, states, triggers)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from calyrex_jax import guidance
from calyrex_jax.backbones import decoder
from calyrex_jax.core.types import Array, Tree
from calyrex_jax.model import Model
from calyrex_jax.training.losses import compacted, cross_entropy
from calyrex_jax.training.step import TrainState, advanced
from calyrex_jax.training.svgt import BridgeLoss, trained_norm


def bridge_objective(
    model: Model,
    loss: BridgeLoss,
    trainable: Tree,
    params: Tree,
    dialogue: guidance.Dialogue,
    states: Array,
    triggers: Array,
    chunk: int,
    compact: bool,
) -> tuple[Array, dict[str, Array]]:
    """The loss of one batch and its parts; `params` hold the backbone and other adapters, `trainable` SVGT's leaves.

    states    [B, P + T, D] at boundary l* + 1
    triggers  [B] int32: 0 is the last prompt position, t token t of the reply; targets and scores count from there on
    """
    tree = trainable["svgt"]
    judged = jax.lax.stop_gradient(guidance.judge(model.svgt, tree["value_space"], states, dialogue))
    bridges = guidance.proposals(model.svgt, tree["bridge"], judged, triggers[:, None])
    higher, final = model.above(params, dialogue, states, bridges, (0,))
    scores = guidance.judge(model.svgt, jax.lax.stop_gradient(tree["value_space"]), higher, dialogue).score
    length = dialogue.reply.shape[1]
    wanted = dialogue.reply_mask & (jnp.arange(length) >= triggers[:, None])
    seen = dialogue.reply_mask & (jnp.arange(1, length + 1) >= triggers[:, None])  # the reply's own positions, 1 … T
    parts = final, dialogue.reply, wanted.astype(jnp.float32)
    if compact:
        chunk *= final.shape[0]
        parts = compacted(*parts)[:3]
    ce, count = cross_entropy(parts[0], decoder.head_matrix(params["backbone"]), parts[1], parts[2], chunk)
    trigger = jnp.take_along_axis(judged.states, triggers[:, None, None], axis=1)[:, 0]
    # an injection changes the state that it is added to
    made = trigger[:, None] + bridges[:, 0] if model.svgt.injects else bridges[:, 0]
    total, found = loss(made, trigger, scores[:, 1:], seen, ce, count)
    return total, found | {"gate": model.svgt.bridge.gate(tree["bridge"])}


def make_bridge_step(
    model: Model, optimizer: optax.GradientTransformation, loss: BridgeLoss, *, chunk: int = 128, compact: bool = False
):
    """`step(state, params, dialogue, states, triggers) -> (state, metrics)` of stage 3; jit it with `state` donated.

    metrics  loss, grad_norm (of the bridge, before clipping), skipped, and what `BridgeLoss` and `bridge_objective` tell
    """

    def step(state: TrainState, params: Tree, dialogue: guidance.Dialogue, states: Array, triggers: Array):
        def objective(bridge: Tree):
            # the value space is a constant here: no backward pass is made for what the optimiser would set to zero
            trainable = {"svgt": state.trainable["svgt"] | {"bridge": bridge}}
            return bridge_objective(model, loss, trainable, params, dialogue, states, triggers, chunk, compact)

        (total, parts), grads = jax.value_and_grad(objective, has_aux=True)(state.trainable["svgt"]["bridge"])
        frozen = jax.tree.map(jnp.zeros_like, state.trainable["svgt"]["value_space"])
        grads = {"svgt": {"value_space": frozen, "bridge": grads}}
        norm = trained_norm(3, grads)
        state = advanced(optimizer, state, grads, jnp.isfinite(total) & jnp.isfinite(norm))
        return state, {"loss": total, "grad_norm": norm, "skipped": state.skipped} | parts

    return step


def make_bridge_loss(model: Model, loss: BridgeLoss, *, chunk: int = 128, compact: bool = False):
    """`loss(trainable, params, dialogue, states, triggers) -> metrics`, for validation; to be jitted."""

    def measure(
        trainable: Tree, params: Tree, dialogue: guidance.Dialogue, states: Array, triggers: Array
    ) -> dict[str, Array]:
        total, parts = bridge_objective(model, loss, trainable, params, dialogue, states, triggers, chunk, compact)
        return {"loss": total} | parts

    return measure
