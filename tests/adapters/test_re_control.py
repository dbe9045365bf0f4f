"""RE-Control: gradient steps lower the value of harmful states and leave the others; what it does cached and whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.api import Site, boundary_key
from calyrex_jax.adapters.re_control import ReControl, value
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.model import Model
from calyrex_jax.training import re_control
from tests import tiny

SPEC = tiny.spec()
BATCH = tiny.packed([[c] for c in tiny.conversations()], 16)
KEY = boundary_key(2)


def made(strength=0.05, steps=2):
    return Model(SPEC, (ReControl((2,), SPEC.embed_dim, 12, steps, strength),))


def harmful(params, bias=2.0):
    leaves = params["adapters"]["re_control"][KEY]
    return params | {"adapters": {"re_control": {KEY: leaves | {"b_out": leaves["b_out"] + bias}}}}


def test_steps_lower_the_value_of_what_is_harmful_alone():
    leaves = tiny.params(made())["adapters"]["re_control"][KEY]
    states = jnp.asarray(np.random.default_rng(0).normal(size=(1, 40, SPEC.embed_dim)) * 5, jnp.float32)
    site = tiny_site(states)
    moved = made().adapters[0].apply(leaves, site)
    before, behind = value(leaves, states)[0], value(leaves, moved)[0]
    bad = np.asarray(before > 0)
    assert bad.any() and not bad.all()
    assert (np.asarray(behind)[bad] < np.asarray(before)[bad]).all()
    np.testing.assert_array_equal(np.asarray(moved)[0, ~bad], np.asarray(states)[0, ~bad])
    drift = np.linalg.norm(moved - states, axis=-1) / np.linalg.norm(states, axis=-1)
    assert 0.04 < drift[0][bad].max() < 0.11  # two steps of a twentieth of the length


def tiny_site(x):
    rows = jnp.zeros(x.shape[:2], jnp.int32)
    return Site(x, x, rows, rows + 1, jnp.zeros((x.shape[0], 0), jnp.int32), 2)


def test_strength_0_and_a_fresh_value_are_the_identity():
    params = harmful(tiny.params(made()))
    wanted = jax.jit(Model(SPEC).logits)(params, BATCH)
    np.testing.assert_array_equal(jax.jit(made(0.0).logits)(params, BATCH), wanted)
    fresh = params | {"adapters": made().init_adapters(jax.random.key(0))}
    np.testing.assert_array_equal(jax.jit(made().logits)(fresh, BATCH), wanted)
    assert float(jnp.abs(jax.jit(made().logits)(params, BATCH) - wanted).max()) > 1e-3


@pytest.mark.slow
def test_cached_equals_uncached():
    tiny.assert_cached_equals_uncached(made(), harmful(tiny.params(made())), new_tokens=6)


def test_every_leaf_matters():
    params = harmful(tiny.params(made()))
    run = jax.jit(made().logits)
    wanted = run(params, BATCH)
    flat = trees.flatten(params["adapters"])
    for path, leaf in flat.items():
        # the offset only decides which states are moved
        change = -30.0 if path.endswith("b_out") else 0.3 * np.random.default_rng(0).normal(size=leaf.shape)
        changed = trees.unflatten(flat | {path: leaf + change})
        assert float(jnp.abs(run(params | {"adapters": changed}, BATCH) - wanted).max()) > 1e-5, path


def test_the_value_learns_a_direction():
    rng = np.random.default_rng(0)
    states = rng.normal(size=(20000, SPEC.embed_dim)).astype(np.float32)
    labels = (states[:, 3] > 0).astype(int)
    leaves = re_control.fit(made().init_adapters(jax.random.key(0))["re_control"][KEY], states, labels, seed=0)
    other = rng.normal(size=(500, SPEC.embed_dim)).astype(np.float32)
    assert ((np.asarray(value(leaves, other)) > 0) == (other[:, 3] > 0)).mean() > 0.85


def test_bad_values_are_refused():
    with pytest.raises(UserError, match=r"config\.re_control\.strength: got -1"):
        made(-1)
    with pytest.raises(UserError, match=r"steps=0; both are at least 1"):
        made(steps=0)
