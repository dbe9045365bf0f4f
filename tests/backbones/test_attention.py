import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones import attention
from calyrex_jax.backbones.attention import Tokens, attend, attend_tokens, chunk_size, visible


def plain_loop(q, k, v, mask):
    """Attention one query and head at a time, in float64."""
    q, k, v, mask = (np.asarray(array) for array in (q, k, v, mask))
    out = np.zeros(q.shape)
    groups = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        seen = np.flatnonzero(mask[b, t])
        if len(seen):
            scores = k[b, seen, n // groups].astype(np.float64) @ q[b, t, n].astype(np.float64)
            weights = np.exp(scores - scores.max())
            out[b, t, n] = weights @ v[b, seen, n // groups] / weights.sum()
    return out


def random_inputs(b=2, t=12, s=12, n=4, k=2, h=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def packed(lengths, t):
    """Tokens of one row of segments of these lengths, then padding."""
    positions, segments = np.zeros((1, t), np.int32), np.zeros((1, t), np.int32)
    start = 0
    for number, length in enumerate(lengths, 1):
        positions[0, start : start + length] = np.arange(length)
        segments[0, start : start + length] = number
        start += length
    return Tokens(jnp.asarray(positions), jnp.asarray(segments))


def test_attend_equals_a_plain_loop():
    q, k, v = random_inputs()
    mask = np.random.default_rng(1).random((2, 12, 12)) < 0.4
    mask[0, 3] = False
    np.testing.assert_allclose(attend(q, k, v, jnp.asarray(mask)), plain_loop(q, k, v, mask), atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_query_that_sees_nothing_gets_exact_zeros_and_finite_gradients(dtype):
    q, k, v = random_inputs(dtype=dtype)
    mask = jnp.ones((2, 12, 12), bool).at[0, 5].set(False).at[1].set(False)
    out = attend(q, k, v, mask)
    assert out.dtype == dtype
    assert np.all(np.asarray(out[0, 5], np.float32) == 0) and np.all(np.asarray(out[1], np.float32) == 0)
    assert np.all(np.asarray(out[0, 4], np.float32) != 0)
    grads = jax.grad(lambda *args: jnp.sum(jnp.square(attend(*args, mask).astype(jnp.float32))), argnums=(0, 1, 2))(q, k, v)
    for grad in grads:
        assert np.all(np.isfinite(np.asarray(grad, np.float32)))
        assert np.all(np.asarray(grad[1], np.float32) == 0)
    assert np.any(np.asarray(grads[0][0], np.float32) != 0)


def test_masked_keys_do_not_matter_however_large_their_scores():
    q, k, v = random_inputs()
    mask = jnp.broadcast_to(jnp.arange(12) < 6, (2, 12, 12))
    far = attend(q, k.at[:, 6:].multiply(1e6), v.at[:, 6:].set(1e6), mask)
    np.testing.assert_array_equal(far, attend(q, k, v, mask))


def test_visible_is_causal_within_segments_and_windows():
    tokens = packed([3, 4], 9)
    mask = np.asarray(visible(tokens, tokens, None))[0]
    expected = np.zeros((9, 9), bool)
    expected[:3, :3] = np.tril(np.ones((3, 3), bool))
    expected[3:7, 3:7] = np.tril(np.ones((4, 4), bool))
    np.testing.assert_array_equal(mask, expected)
    within = np.asarray(visible(tokens, tokens, 2))[0]
    np.testing.assert_array_equal(within, expected & ~np.tril(np.ones((9, 9), bool), -2))


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("ordered", [True, False])
def test_pieces_and_chunks_of_queries_change_nothing(monkeypatch, window, ordered):
    inputs = random_inputs(b=1, t=300, s=300)
    tokens = packed([120, 150], 300)
    mask = visible(tokens, tokens, window)

    def whole(q, k, v):
        return attend(q, k, v, mask)

    def parts(q, k, v):
        return attend_tokens(q, k, v, tokens, tokens, window, ordered)

    def gradients(fn):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), argnums=(0, 1, 2))(*inputs)

    np.testing.assert_allclose(parts(*inputs), whole(*inputs), atol=1e-6)
    monkeypatch.setattr(attention, "_MAX_CHUNK", 64)
    monkeypatch.setattr(attention, "_MIN_CHUNK", 32)
    np.testing.assert_allclose(parts(*inputs), whole(*inputs), atol=1e-6)
    for ours, theirs in zip(gradients(parts), gradients(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_chunks_bound_the_scores_of_long_sequences():
    assert chunk_size(1024, 1024) == 1024
    assert chunk_size(1536, 1536) == 768  # no chunk is padded where the length divides
    assert chunk_size(1, 131072) == 1
    for length in (4096, 8192, 32768, 131072):
        assert chunk_size(length, length) * length <= max(1024 * 4096, 128 * length)


def test_long_prompts_never_hold_all_scores_at_once():
    t, heads = 8192, 2
    q = jax.ShapeDtypeStruct((1, t, heads, 8), jnp.float32)
    where = jax.ShapeDtypeStruct((1, t), jnp.int32)

    def run(q, k, v, positions, segments):
        tokens = Tokens(positions, segments)
        return attend_tokens(q, k, v, tokens, tokens, None, ordered=True)

    def loss(q, k, v, positions, segments):
        return jnp.sum(run(q, k, v, positions, segments))

    for fn in (run, jax.grad(loss)):
        memory = jax.jit(fn).lower(q, q, q, where, where).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * heads * t * t // 2
