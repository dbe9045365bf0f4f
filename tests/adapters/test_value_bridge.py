import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.value_bridge import Bridge, BridgeConfig
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from tests import tiny

CONFIG = BridgeConfig(embed_dim=16, value_dim=6, num_tokens=5, num_heads=4)
RNG = np.random.default_rng(0)
H_V, DZ = RNG.normal(size=(3, 16)).astype(np.float32), RNG.normal(size=(3, 6)).astype(np.float32)


def test_tokens_start_near_the_normed_trigger():
    bridge = Bridge(CONFIG)
    params = bridge.init(jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    np.testing.assert_allclose(bridge.gate(params), np.log1p(np.exp(-2)), rtol=1e-6)
    tokens = np.asarray(jax.jit(bridge.propose)(params, H_V, DZ))
    assert tokens.shape == (3, 5, 16) and tokens.dtype == np.float32
    normed = (H_V - H_V.mean(-1, keepdims=True)) / np.sqrt(H_V.var(-1, keepdims=True) + 1e-5)
    assert 0.01 < np.abs(tokens - normed[:, None]).mean() < 0.3
    assert np.abs(tokens[:, 0] - tokens[:, 1]).max() > 0, "the seeds tell the tokens apart"
    assert np.std(trees.flatten(params)["seeds"]) == pytest.approx(0.02, rel=0.3)


def test_every_leaf_of_a_random_state_matters():
    bridge = Bridge(CONFIG)
    leaves = trees.flatten(tiny.noise(jax.eval_shape(bridge.init, jax.random.key(0)), 1, 0.4))
    run = jax.jit(bridge.propose)
    before = run(trees.unflatten(leaves), H_V, DZ)
    for path, leaf in leaves.items():
        moved = leaves | {path: leaf + 0.1 * RNG.normal(size=leaf.shape).astype(np.float32)}
        assert np.abs(run(trees.unflatten(moved), H_V, DZ) - before).max() > 1e-4, path


def test_gradients_are_finite_also_for_nothing():
    bridge = Bridge(CONFIG)
    params = bridge.init(jax.random.key(0))
    slope = jax.jit(jax.grad(lambda *args: (bridge.propose(*args) ** 3).sum(), argnums=(0, 1, 2)))
    slopes = slope(params, 0 * H_V, 0 * DZ)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_a_half_precision_trigger_is_read_in_full():
    bridge = Bridge(CONFIG)
    params, half = bridge.init(jax.random.key(0)), jnp.asarray(H_V, jnp.bfloat16)
    run = jax.jit(bridge.propose)
    tokens = run(params, half, DZ)
    assert tokens.dtype == jnp.float32
    np.testing.assert_array_equal(tokens, run(params, half.astype(jnp.float32), DZ))


def test_what_cannot_be():
    with pytest.raises(UserError, match=r"config\.svgt\.num_bridge_tokens: got 0, expected at least 1"):
        BridgeConfig(16, 6, 0, 4)
    with pytest.raises(UserError, match=r"config\.svgt\.num_bridge_heads: 5 heads do not divide the backbone's width 16"):
        BridgeConfig(16, 6, 5, 5)
