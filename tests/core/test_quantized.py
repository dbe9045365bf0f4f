"""Quantised leaves: error bounds, zeros, shapes, products with tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.core import quantized, trees
from tests import tiny


def weights(shape=(128, 6, 8), seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def leaf(w, axes, kind):
    return jax.tree.map(jnp.asarray, quantized.encode(w, axes, kind))


def relative(w, node):
    back = np.asarray(quantized.decoded(node, jnp.float32))
    return np.sqrt(np.mean((back - w) ** 2) / np.mean(w**2))


# root mean square errors of normal weights: 1/127 of a maximum of about 3 for int8, about a tenth for 4 bits
@pytest.mark.parametrize(("kind", "low", "high"), [("int8", 0.002, 0.012), ("int4", 0.04, 0.1), ("nf4", 0.05, 0.11)])
@pytest.mark.parametrize(("shape", "axes"), [((128, 6, 8), (0,)), ((4, 64, 24), (0, 1)), ((96, 40), (0,))])
def test_errors_are_those_of_the_format(kind, low, high, shape, axes):
    w = weights(shape)
    node = leaf(w, axes, kind)
    assert node["q"].shape == w.shape
    assert low < relative(w, node) < high


def test_int8_is_within_half_a_step_of_every_weight():
    w = weights()
    node = leaf(w, (0,), "int8")
    step = np.asarray(node["scale"])
    assert step.shape == (1, 6, 8)
    assert np.all(np.abs(np.asarray(quantized.decoded(node, jnp.float32)) - w) <= step * 0.5001)


def test_nf4_takes_the_nearest_quantile():
    w = weights((64, 5))
    q, scale = quantized.encode(w, (0,), "nf4").values()
    nearest = np.abs(w[None] / scale.astype(np.float32) - quantized._NF4[:, None, None]).argmin(0)
    np.testing.assert_array_equal(q.astype(int), nearest)
    node = {"q": jnp.asarray(q), "scale": jnp.asarray(scale)}
    np.testing.assert_allclose(
        quantized.decoded(node, jnp.float32), quantized._NF4[nearest] * scale.astype(np.float32), rtol=1e-6
    )


def test_int4_keeps_the_grid_of_a_four_bit_file():
    """Blocks of 32 with sixteen even steps, llama.cpp's Q4_1: nothing is lost but bfloat16's rounding of step and offset."""
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 16, (64, 7)).astype(np.float32)
    steps[::32], steps[1::32] = 0, 15
    w = steps * np.float32(0.03) + np.repeat(rng.normal(size=(2, 7)).astype(np.float32) * 0.1 - 0.2, 32, axis=0)
    parts = quantized.encode(w, (0,), "int4")
    np.testing.assert_array_equal(parts["q"].astype(int), steps - 8)
    assert relative(w, jax.tree.map(jnp.asarray, parts)) < 0.005


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
def test_zeros_stay_zero(kind):
    w = weights((64, 4))
    w[:, 1] = 0
    np.testing.assert_array_equal(quantized.decoded(leaf(w, (0,), kind), jnp.float32)[:, 1], np.zeros(64))


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_abstract_shapes_are_those_of_the_encoder(name, kind):
    plain = decoder.abstract_params(tiny.spec(name), jnp.bfloat16)
    made = quantized.abstract(plain, kind)
    assert trees.count(made) == trees.count(plain)
    for path, like in trees.flatten(plain).items():
        if not (own := quantized.kind_of(path, kind)):
            assert trees.flatten(made)[path] == like
            continue
        layered = path.startswith("layers/")
        parts = quantized.encode(weights(like.shape[layered:]), quantized.input_axes(path), own)
        found = {name.rsplit("/", 1)[1]: leaf for name, leaf in trees.flatten(made).items() if name.startswith(f"{path}/")}
        assert {name: (leaf.shape[layered:], leaf.dtype) for name, leaf in found.items()} == {
            name: (part.shape, part.dtype) for name, part in parts.items()
        }


def test_a_table_multiplies_as_its_decoded_self():
    w, x = weights((40, 16)), jnp.asarray(weights((2, 3, 16), 1))
    table = leaf(w, (1,), "int8")
    plain = quantized.decoded(table, jnp.float32)
    assert table["scale"].shape == (40, 1)
    np.testing.assert_allclose(quantized.table_logits(x, table), quantized.table_logits(x, plain), rtol=1e-5, atol=1e-5)
    slopes = jnp.asarray(weights((2, 3, 40), 2))
    want = quantized.table_states(slopes, plain, jnp.float32)
    np.testing.assert_allclose(quantized.table_states(slopes, table, jnp.float32), want, rtol=1e-5, atol=1e-5)
    ids = jnp.asarray([[0, 39, 99]])
    np.testing.assert_array_equal(quantized.table_rows(table, ids, jnp.float32), plain[jnp.asarray([[0, 39, 39]])])
    assert quantized.table_size(table) == quantized.table_size(plain) == 40


def test_decoding_rounds_once():
    node = leaf(weights(), (0,), "int8")
    wide = quantized.decoded(node, jnp.float32)
    np.testing.assert_array_equal(quantized.decoded(node, jnp.bfloat16), wide.astype(jnp.bfloat16))
    assert jax.tree.map(lambda a: a.dtype, node)["q"] == jnp.int8
