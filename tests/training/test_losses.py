import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.core.types import Batch, slots
from calyrex_jax.training.losses import compacted, cross_entropy, distilled, shifted

VOCAB = 101


def numbers(rows=3, count=13, width=16, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    states = jnp.asarray(rng.normal(size=(rows, count, width)), dtype)
    head = jnp.asarray(rng.normal(size=(VOCAB, width)), dtype)
    labels = rng.integers(0, VOCAB, (rows, count)).astype(np.int32)
    weights = rng.choice([0.0, 1.0, 0.5], (rows, count)).astype(np.float32)
    return states, head, labels, weights


def plain(states, head, labels, weights):
    logits = jnp.einsum("bmd,vd->bmv", states, head, preferred_element_type=jnp.float32)
    return -(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0] * weights).sum()


@pytest.mark.parametrize("chunk", [1, 4, 13, 128])
def test_chunks_equal_the_plain_loss_and_its_gradient(chunk):
    """13 positions fill no chunk of 4: what is padded must count for nothing. The cotangent is not 1."""
    states, head, labels, weights = numbers()

    def ours(states):
        return 2.5 * cross_entropy(states, head, labels, weights, chunk)[0]

    loss, grad = jax.jit(jax.value_and_grad(ours))(states)
    expected, expected_grad = jax.value_and_grad(lambda s: 2.5 * plain(s, head, labels, weights))(states)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(grad, expected_grad, atol=1e-5)
    value, count = cross_entropy(states, head, labels, weights, chunk)  # the path without a gradient
    np.testing.assert_allclose(value, expected / 2.5, rtol=1e-5)
    assert float(count) == weights.sum() and value.dtype == count.dtype == jnp.float32


def test_bfloat16_states_and_head_are_summed_in_float32():
    states, head, labels, weights = numbers(dtype=jnp.bfloat16)
    loss, grad = jax.value_and_grad(lambda s: cross_entropy(s, head, labels, weights, 4)[0])(states)
    expected, expected_grad = jax.value_and_grad(lambda s: plain(s, head, labels, weights))(states)
    assert loss.dtype == jnp.float32 and grad.dtype == jnp.bfloat16
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    wide = np.asarray(expected_grad, np.float32)
    np.testing.assert_allclose(np.asarray(grad, np.float32), wide, atol=0.02 * np.abs(wide).max())


def test_without_any_weight_loss_and_gradient_are_zero():
    states, head, labels, weights = numbers()
    run = jax.value_and_grad(lambda s: cross_entropy(s, head, labels, 0 * weights, 4)[0])
    chex.assert_trees_all_equal(run(states), (jnp.zeros(()), jnp.zeros_like(states)))


def test_extreme_logits_stay_finite():
    states, head, labels, weights = numbers()
    loss, grad = jax.value_and_grad(lambda s: cross_entropy(s, head, labels, weights, 4)[0])(states * 1e4)
    chex.assert_tree_all_finite((loss, grad))


def test_all_logits_never_exist_at_once():
    states, head, labels, weights = numbers(count=48)
    run = jax.grad(lambda s: cross_entropy(s, head, labels, weights, 8)[0])
    text = str(jax.make_jaxpr(run)(states)).replace(" ", "")
    assert f"[3,8,{VOCAB}]" in text and f"48,{VOCAB}]" not in text


def soft_numbers():
    states, head, labels, weights = numbers()
    rng = np.random.default_rng(7)
    teacher = jnp.asarray(rng.normal(size=states.shape), states.dtype)
    return states, head, labels, weights, teacher, rng.random(labels.shape) < 0.5


@pytest.mark.parametrize("chunk", [4, 13])
@pytest.mark.parametrize("compact", [False, True])
def test_distilled_positions_follow_the_teacher_and_the_others_the_labels(chunk, compact):
    states, head, labels, weights, teacher, soft = soft_numbers()

    def ours(states):
        parts = (states, labels, weights, teacher, soft)
        states_, labels_, weights_, teacher_, soft_ = compacted(*parts) if compact else parts
        return 2.5 * cross_entropy(states_, head, labels_, weights_, chunk, teacher_, soft_)[0]

    def expected(states):
        q, p = (jax.nn.log_softmax(jnp.einsum("bmd,vd->bmv", x, head)) for x in (states, teacher))
        divergence = (jnp.exp(p) * (p - q)).sum(-1)
        hard = -jnp.take_along_axis(q, labels[..., None], -1)[..., 0]
        return 2.5 * (jnp.where(soft, divergence, hard) * weights).sum()

    (loss, grad), (other, other_grad) = (jax.jit(jax.value_and_grad(f))(states) for f in (ours, expected))
    np.testing.assert_allclose(loss, other, rtol=1e-5)
    np.testing.assert_allclose(grad, other_grad, atol=2e-5)


def test_a_model_that_agrees_with_its_teacher_has_no_loss_and_no_gradient():
    states, head, labels, weights, _, _ = soft_numbers()
    soft = np.ones(labels.shape, bool)
    loss, grad = jax.value_and_grad(lambda s: cross_entropy(s, head, labels, weights, 4, states, soft)[0])(states)
    assert abs(float(loss)) < 1e-4
    np.testing.assert_allclose(grad, np.zeros_like(states), atol=1e-6)


def test_compacted_puts_what_counts_in_front_and_the_distilled_behind_it():
    weights = np.array([[0.0, 1.0, 1.0], [0.5, 0.0, 1.0]], np.float32)
    soft = np.array([[True, True, False], [False, True, True]])
    index = np.arange(6).reshape(2, 3)
    states = index[..., None].astype(np.float32)
    moved = compacted(states, index, weights, states, soft)
    assert np.asarray(moved[1]).tolist() == [[2, 3, 1, 5, 0, 4]]
    assert np.asarray(moved[2]).tolist() == [[1.0, 0.5, 1.0, 1.0, 0.0, 0.0]]
    np.testing.assert_array_equal(moved[0][..., 0], moved[1])
    plain = compacted(states, index, weights)
    assert np.asarray(plain[1]).tolist() == [[1, 2, 3, 5, 0, 4]] and plain[3] is plain[4] is None


def rows(segments, targets, tokens=None):
    """A Batch of the given masks; targets as a mask, and as slots."""
    segments, targets = np.asarray(segments, np.int32), np.asarray(targets, bool)
    tokens = np.arange(segments.size).reshape(segments.shape) % VOCAB if tokens is None else np.asarray(tokens)
    empty = np.zeros((len(segments), 0), np.int32)
    masked = Batch(tokens.astype(np.int32), segments, segments, targets & False, targets, empty)
    return masked, masked.replace(target_slots=slots(targets, segments.shape[1] + 3))


SEGMENTS = [[1, 1, 1, 2, 2, 2, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1]]
TARGETS = [[1, 0, 1, 1, 0, 1, 0, 0], [0, 0, 1, 0, 1, 1, 0, 1]]
COUNTED = [[2, 5], [4, 5, 7]]  # not 0 of row 0, 3 of row 0 nor 2 of row 1: nothing of their segment comes before


@pytest.mark.parametrize("by_slots", [False, True])
def test_targets_are_predicted_from_the_state_before_them(by_slots):
    batch = rows(SEGMENTS, TARGETS)[by_slots]
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)
    states, labels, weights = shifted(x, batch)
    for row, counted in enumerate(COUNTED):
        found = np.flatnonzero(np.asarray(weights[row]))
        np.testing.assert_array_equal(labels[row][found], batch.tokens[row][counted])
        np.testing.assert_array_equal(states[row][found], x[row][np.array(counted) - 1])
    assert set(np.unique(weights)) == {0.0, 1.0} and weights.dtype == jnp.float32


def test_targets_alone_give_the_loss_and_gradient_of_all_positions():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 16)), jnp.float32)
    head = numbers()[1]

    def loss(x, batch):
        states, labels, weights = shifted(x, batch)
        return cross_entropy(states, head, labels, weights, 4)

    masked, slotted = rows(SEGMENTS, TARGETS)
    (one, count), (other, same) = loss(x, masked), loss(x, slotted)
    np.testing.assert_allclose(one, other, rtol=1e-6)
    assert float(count) == float(same) == 5
    grads = [jax.grad(lambda x, batch=batch: loss(x, batch)[0])(x) for batch in (masked, slotted)]
    np.testing.assert_allclose(*grads, atol=1e-6)
    used = np.zeros((2, 8), bool)
    for row, counted in enumerate(COUNTED):
        used[row, np.array(counted) - 1] = True
    assert (np.abs(grads[0]).max(-1) > 0).tolist() == used.tolist()


def test_the_end_token_is_a_target_even_where_it_pads_too():
    """Masks come from lengths and never from ids: with pad = eos = 2 the last real 2 is learned, the padding is not."""
    tokens = [[5, 6, 7, 2, 2, 2, 2, 2]]
    for batch in rows([[1, 1, 1, 1, 0, 0, 0, 0]], [[0, 0, 1, 1, 0, 0, 0, 0]], tokens):
        _, labels, weights = shifted(jnp.zeros((1, 8, 16)), batch)
        assert np.asarray(labels)[np.asarray(weights) > 0].tolist() == [7, 2]


def test_unused_slots_point_at_real_labels():
    """A label of -1 or -100 would gather another class, or NaN, before the mask is applied."""
    for batch in rows(SEGMENTS, TARGETS):
        _, labels, _ = shifted(jnp.zeros((2, 8, 16)), batch)
        assert labels.min() >= 0 and labels.max() < VOCAB


def test_one_token_conversations_have_nothing_to_predict():
    for batch in rows([[1, 2, 3, 0]], [[1, 1, 1, 0]]):
        assert float(shifted(jnp.zeros((1, 4, 16)), batch)[2].sum()) == 0


def test_sums_of_unequal_rows_make_one_mean():
    """A row of one target and a row of nine: the mean is over ten tokens, not over two rows' means."""
    states, head, labels, _ = numbers(rows=2, count=9)
    weights = np.zeros((2, 9), np.float32)
    weights[0, 0], weights[1] = 1, 1
    total, count = cross_entropy(states, head, labels, weights)
    parts = [cross_entropy(states[r : r + 1], head, labels[r : r + 1], weights[r : r + 1]) for r in (0, 1)]
    np.testing.assert_allclose(total / count, (parts[0][0] + parts[1][0]) / 10, rtol=1e-6)
    assert abs(total / count - (parts[0][0] + parts[1][0] / 9) / 2) > 1e-3


@pytest.mark.parametrize("by_slots", [False, True])
def test_distilled_follows_the_positions_of_shifted(by_slots):
    batch = rows(SEGMENTS, TARGETS)[by_slots]
    assert distilled(batch) is None
    chosen = np.zeros((2, 8), bool)
    chosen[0, 5] = chosen[1, 4] = True
    x = jnp.zeros((2, 8, 16))
    soft, (_, labels, weights) = np.asarray(distilled(batch.replace(distill=chosen))), shifted(x, batch)
    assert np.asarray(labels)[soft & (np.asarray(weights) > 0)].tolist() == [batch.tokens[0, 5], batch.tokens[1, 4]]
