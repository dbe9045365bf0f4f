"""The value of RE-Control, fitted to the states of labelled replies: every state bears its reply's label."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from calyrex_jax.adapters.re_control import value
from calyrex_jax.core.types import Array, Tree

_ROWS, _PASSES, _RATE = 256, 4, 1e-3


def fit(params: Tree, states: np.ndarray, labels: np.ndarray, seed: int) -> Tree:
    """Leaves after a few passes over states [M, D] with labels [M] by AdamW and binary cross-entropy."""
    optimizer = optax.adamw(_RATE)
    # zeros have no slope for the first layer to learn from
    params = params | {
        "w_out": jax.random.normal(jax.random.key(seed), params["w_out"].shape) * params["w_out"].size ** -0.5
    }
    state = optimizer.init(params)
    rng = np.random.default_rng(seed)
    for _ in range(_PASSES):
        order = rng.permutation(len(states))
        for start in range(0, len(order), _ROWS):
            chosen = np.resize(order[start : start + _ROWS], _ROWS)  # the last batch is filled with its own rows
            params, state = _step(optimizer, params, state, states[chosen], labels[chosen].astype(np.float32))
    return params


@partial(jax.jit, static_argnums=0)
def _step(optimizer: optax.GradientTransformation, params: Tree, state: Tree, x: Array, labels: Array) -> tuple[Tree, Tree]:
    def loss(params: Tree) -> Array:
        return optax.sigmoid_binary_cross_entropy(value(params, x.astype(jnp.float32)), labels).mean()

    updates, state = optimizer.update(jax.grad(loss)(params), state, params)
    return optax.apply_updates(params, updates), state
