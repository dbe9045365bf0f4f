"""The shared matrix product and the buffers that are updated in place."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.core.numerics import matmul, put, storage_type, stored, take_layer


def draw(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


@pytest.mark.parametrize(("shape", "contract", "rule"), [((8, 3, 4), 1, "btd,dnh->btnh"), ((3, 4, 8), 2, "btnh,nhd->btd")])
def test_values_and_both_gradients_equal_einsum(shape, contract, rule):
    x, w = draw(2, 5, *shape[:contract]), draw(*shape, seed=1)
    chex.assert_trees_all_close(matmul(x, w, contract), jnp.einsum(rule, x, w), rtol=1e-5, atol=1e-5)
    ours = jax.grad(lambda x, w: jnp.sin(matmul(x, w, contract)).sum(), argnums=(0, 1))(x, w)
    plain = jax.grad(lambda x, w: jnp.sin(jnp.einsum(rule, x, w)).sum(), argnums=(0, 1))(x, w)
    chex.assert_trees_all_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_float32_weights_beside_a_bfloat16_stream_keep_float32_gradients():
    x, w = draw(2, 5, 64, dtype=jnp.bfloat16), draw(64, 16, seed=1)
    assert matmul(x, w).dtype == jnp.bfloat16
    dx, dw = jax.grad(lambda x, w: matmul(x, w).astype(jnp.float32).sum(), argnums=(0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    exact = x.astype(jnp.float32).sum((0, 1))[:, None] * jnp.ones((1, 16))
    chex.assert_trees_all_close(dw, exact, rtol=1e-6, atol=1e-6)


def test_bfloat16_products_add_in_float32():
    # 4096 ones after a first 256: a bfloat16 running sum would stay at 256
    x, w = jnp.ones((1, 4352), jnp.bfloat16), jnp.ones((4352, 1), jnp.bfloat16)
    assert float(matmul(x, w)[0, 0]) == 4352.0


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_buffers_hold_exactly_what_was_put(dtype):
    buffer = jnp.zeros((3, 2, 5), storage_type(dtype))
    values = draw(1, 2, 2, dtype=dtype)
    buffer = put(buffer, values, (1, 0, 3))
    chex.assert_trees_all_equal(take_layer(buffer, 1, dtype)[:, 3:], values[0])
    assert not np.asarray(take_layer(buffer, 0, dtype), np.float32).any()


def test_layers_of_a_bfloat16_stack_are_taken_bit_for_bit():
    stack = draw(4, 3, 5, dtype=jnp.bfloat16)
    chex.assert_trees_all_equal(jax.jit(take_layer)(stack, 2), stack[2])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_stored_stack_gives_the_same_layers(dtype):
    stack = draw(4, 3, 5, dtype=dtype)
    kept = stored(stack)
    assert kept.dtype == storage_type(dtype) and kept.nbytes == stack.nbytes
    chex.assert_trees_all_equal(jax.jit(take_layer)(kept, 2), stack[2])
    assert stored(kept) is kept
