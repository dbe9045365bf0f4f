import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.value_space import STAGE_1_KEYS, STAGE_2_KEYS, ValueSpace, ValueSpaceConfig
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from tests import tiny

D, Z = 20, 12
# both poolings, both aggregates, causal and not
KINDS = list(itertools.product(("last", "attention"), ("mlp", "blocks"), (True, False)))
FEW = [("last", "mlp", True), ("attention", "blocks", True), ("attention", "mlp", False), ("last", "blocks", False)]


def made(pooling="last", aggregate="mlp", causal=True, **changes):
    return ValueSpace(ValueSpaceConfig(D, Z, 3, pooling, aggregate, causal, **changes))


@functools.cache
def params_of(value, seed=1):
    """A random state in which every leaf is far from its start."""
    return tiny.noise(jax.eval_shape(value.init, jax.random.key(0)), seed, 0.4)


def states(seed, *shape):
    return np.random.default_rng(seed).normal(size=(*shape, D)).astype(np.float32)


def placed(array, length, start, fill):
    """Rows [B, T, D] within `length` positions from `start` on, `fill` around them, and their mask."""
    out = np.full((array.shape[0], length, array.shape[2]), fill, np.float32)
    out[:, start : start + array.shape[1]] = array
    mask = np.zeros(out.shape[:2], bool)
    mask[:, start : start + array.shape[1]] = True
    return out, mask


def valid(z, mask, causal):
    return np.asarray(z)[mask] if causal else np.asarray(z)[:, 0]


@pytest.mark.parametrize(("pooling", "aggregate", "causal"), FEW)
def test_padding_on_any_side_and_of_any_content_changes_nothing(pooling, aggregate, causal):
    value = made(pooling, aggregate, causal)
    params, response, prompt = params_of(value), states(2, 2, 6), states(3, 2, 5)
    run = jax.jit(value.values)
    expected = run(params, response, np.ones((2, 6), bool), prompt, np.ones((2, 5), bool))
    for start, fill in ((0, 0.0), (2, 7.0), (5, np.nan)):
        inputs = (*placed(response, 11, start, fill), *placed(prompt, 9, start - start // 2, fill))
        z = run(params, *inputs)
        assert np.isfinite(z).all()
        np.testing.assert_allclose(
            valid(z, inputs[1], causal), valid(expected, np.ones((2, 6), bool), causal), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize(("pooling", "aggregate", "causal"), KINDS)
def test_growing_by_chunks_equals_the_whole(pooling, aggregate, causal):
    value = made(pooling, aggregate, causal)
    params, response = params_of(value), states(2, 2, 10)
    prompt, prompt_mask = placed(states(3, 2, 5), 8, 3, 9.0)

    @jax.jit
    def grown(params):
        def body(state, chunk):
            z, state = value.extend(params, state, chunk)
            return state, z

        first, state = value.extend(params, value.begin(params, prompt, prompt_mask, capacity=12), response[:, :1])
        state, rest = jax.lax.scan(body, state, jnp.asarray(response[:, 1:]).reshape(2, 3, 3, D).swapaxes(0, 1))
        return jnp.concatenate([first[None], rest]), state["length"]

    whole = jax.jit(value.values)
    found, length = grown(params)
    assert found.shape == (4, 2, Z) and int(length) == 10
    for end, z in zip((1, 4, 7, 10), found):
        so_far = np.broadcast_to(np.arange(10) < end, (2, 10))
        expected = whole(params, response, so_far, prompt, prompt_mask)[:, end - 1 if causal else 0]
        np.testing.assert_allclose(z, expected, rtol=0, atol=1e-5)
    assert np.abs(found[3] - found[2]).max() > 1e-2


@pytest.mark.parametrize("pooling", ["last", "attention"])
def test_the_value_of_a_prefix_is_that_of_the_response_cut_there(pooling):
    value = made(pooling)
    run, response = jax.jit(value.values), states(2, 2, 6)
    z = run(params_of(value), response, np.ones((2, 6), bool))
    cut = run(params_of(value), response, np.broadcast_to(np.arange(6) < 4, (2, 6)))
    np.testing.assert_allclose(z[:, :4], cut[:, :4], rtol=0, atol=1e-5)


def test_attention_pooling_holds_scores_that_no_exponential_holds():
    """Then the position of the largest score so far is all that counts."""
    value, plain = made("attention"), made()
    leaves = trees.flatten(params_of(value))
    response, mask = states(8, 1, 6), np.ones((1, 6), bool)
    each = np.asarray(jax.jit(plain.values)({k: v for k, v in params_of(value).items() if k != "pool"}, response, mask))

    @jax.jit
    def run(params):
        def total(params, response):
            z = value.values(params, response, mask)
            return (z**2).sum(), z

        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, response)

    grads, z = run(trees.unflatten(leaves | {"pool": -1e5 * leaves["pool"]}))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    chosen = [int(np.abs(each[0, : t + 1] - z[0, t]).max(-1).argmin()) for t in range(6)]
    np.testing.assert_allclose(z[0], each[0, chosen], rtol=0, atol=1e-4)
    assert chosen[0] == 0 and sorted(chosen) == chosen and len(set(chosen)) > 1


def test_the_correction_reaches_the_boundary_where_the_score_is_linear_and_is_zero_below_it():
    value = made()
    params, z = params_of(value), np.random.default_rng(3).normal(size=(400, Z)).astype(np.float32)
    score, dz = value.score(params, z), np.asarray(jax.jit(value.correction)(params, z))
    harmful = np.asarray(score) > 0
    assert 40 < harmful.sum() < 360
    assert (dz[~harmful] == 0).all() and not np.signbit(dz[~harmful]).any()
    assert (np.abs(dz[harmful]).max(-1) > 0).all()
    # to first order s vanishes: what is left is of second order in the step
    near = harmful & (np.asarray(score) < 0.05)
    assert near.any()
    left = np.asarray(value.score(params, z + dz))
    assert np.abs(left[near]).max() < 0.2 * np.asarray(score)[near].max()
    half = np.asarray(jax.jit(made(step=0.5).correction)(params, z))
    np.testing.assert_allclose(half, 0.5 * dz, rtol=1e-6)


def test_a_flat_score_gives_no_correction_and_no_nan():
    value = made()
    leaves = trees.flatten(params_of(value))
    flat = leaves | {"discriminator/hidden/kernel": 0 * leaves["discriminator/hidden/kernel"]}
    flat["discriminator/out/bias"] = 0 * leaves["discriminator/out/bias"] + 50.0

    def total(params, z):
        dz = value.correction(params, z)
        return (dz**2).sum(), dz

    z = np.random.default_rng(3).normal(size=(5, Z)).astype(np.float32)
    grads, dz = jax.jit(jax.grad(total, argnums=(0, 1), has_aux=True))(trees.unflatten(flat), z)
    assert (np.asarray(value.score(trees.unflatten(flat), z)) > 0).all()
    assert (np.asarray(dz) == 0).all() and all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


@pytest.mark.parametrize(("pooling", "aggregate", "causal"), FEW)
def test_gradients_are_finite_also_where_nothing_is_valid(pooling, aggregate, causal):
    value = made(pooling, aggregate, causal)
    response, prompt = states(2, 3, 6), states(3, 3, 5)
    mask, prompt_mask = np.ones((3, 6), bool), np.ones((3, 5), bool)
    mask[0] = prompt_mask[1] = False
    response[0], prompt[1] = np.inf, np.nan
    key = jax.random.key(5) if pooling == "attention" else None

    def total(params, response, prompt):
        z = value.values(params, response, mask, prompt, prompt_mask, key)
        return (value.score(params, z) ** 2).sum() + (value.correction(params, z) ** 2).sum()

    slopes = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(params_of(value), response, prompt)
    for path, leaf in trees.flatten(dict(enumerate(slopes))).items():
        assert np.isfinite(leaf).all(), path


@pytest.mark.parametrize(("pooling", "aggregate", "causal"), FEW)
def test_every_leaf_of_a_random_state_matters(pooling, aggregate, causal):
    value = made(pooling, aggregate, causal)
    leaves, rng = trees.flatten(params_of(value)), np.random.default_rng(7)
    response, prompt = states(2, 2, 6), states(3, 2, 5)
    masks = np.ones((2, 6), bool), np.ones((2, 5), bool)

    @jax.jit
    def scores(params):
        return value.score(params, value.values(params, response, masks[0], prompt, masks[1]))

    before = scores(trees.unflatten(leaves))
    for path, leaf in leaves.items():
        moved = leaves | {path: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32)}
        assert np.abs(scores(trees.unflatten(moved)) - before).max() > 1e-4, path


def test_keys_tell_what_each_stage_adds():
    for pooling, aggregate in (("last", "mlp"), ("attention", "blocks")):
        value = made(pooling, aggregate)
        params = value.init(jax.random.key(0))
        assert set(params) <= {*STAGE_1_KEYS, *STAGE_2_KEYS} and set(STAGE_2_KEYS) < set(params)
        mask = np.ones((2, 6), bool)

        def total(params, value=value, mask=mask):
            return value.score(params, value.values(params, states(2, 2, 6), mask)).sum()

        slopes = jax.jit(jax.grad(total))(params)
        for name, tree in slopes.items():
            moved = [bool((np.asarray(leaf) != 0).any()) for leaf in jax.tree.leaves(tree)]
            assert not any(moved) if name in STAGE_2_KEYS else all(moved), name


def test_at_the_start():
    leaves = trees.flatten(made("attention", "blocks").init(jax.random.key(0)))
    assert all(leaf.dtype == jnp.float32 for leaf in leaves.values())
    assert float(leaves["conditional/strength"]) == 3.0
    for path, leaf in leaves.items():
        if path.endswith("bias"):
            assert (leaf == 0).all(), path
        elif path.endswith("scale"):
            assert (leaf == 1).all(), path
    other = trees.flatten(made("attention", "blocks").init(jax.random.key(1)))
    assert (leaves["response/kernel"] != other["response/kernel"]).any()


def test_dropout_follows_its_key():
    value = made(dropout=0.3)
    params, response, mask = params_of(value), states(2, 1, 6), np.ones((1, 6), bool)

    @jax.jit
    def run(key):
        return value.values(params, response, mask, response, mask, key)

    first, again, other = run(jax.random.key(1)), run(jax.random.key(1)), run(jax.random.key(2))
    assert (first == again).all() and np.abs(first - other).max() > 1e-2
    undropped = jax.jit(made(dropout=0.0).values)(params, response, mask, response, mask, jax.random.key(1))
    np.testing.assert_allclose(undropped, jax.jit(value.values)(params, response, mask, response, mask), rtol=0, atol=1e-5)


def test_half_precision_states_are_read_in_full():
    value = made()
    params, mask = params_of(value), np.ones((2, 6), bool)
    half = jnp.asarray(states(2, 2, 6), jnp.bfloat16)
    run = jax.jit(value.values)
    z = run(params, half, mask, half, mask)
    assert z.dtype == jnp.float32
    wide = half.astype(jnp.float32)
    np.testing.assert_array_equal(z, run(params, wide, mask, wide, mask))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pooling": "mean"}, r"config\.svgt\.pooling: 'mean' is not known"),
        ({"aggregate": "sum"}, r"config\.svgt\.aggregate: 'sum' is not known"),
        ({"num_heads": 5}, r"config\.svgt\.num_heads: 5 heads do not divide a value space of width 12"),
        ({"num_heads": 0}, r"config\.svgt\.num_heads: 0 heads"),
        ({"value_dim": 0}, r"config\.svgt\.value_dim: got 0"),
        ({"step": 0.0}, r"config\.svgt\.step: got 0"),
        ({"dropout": 1.0}, r"config\.svgt\.dropout: got 1"),
    ],
)
def test_what_cannot_be(changes, said):
    with pytest.raises(UserError, match=said):
        ValueSpaceConfig(**{"embed_dim": D, "value_dim": Z, "num_heads": 3} | changes)
