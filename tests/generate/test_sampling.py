import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.generate.sampling import Sampling, choose, nucleus

ROWS = 4000
RUN = jax.jit(choose, static_argnums=(1, 5))


def draws(logits, sampling, rows=ROWS, step=0, vocab_limit=10**6):
    """One token for each of `rows` rows that share their logits."""
    wide = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (rows, len(logits)))
    return np.asarray(RUN(wide, sampling, sampling.seed, jnp.arange(rows), step, vocab_limit))


def smallest_set(probabilities, p):
    """The nucleus by its definition: the smallest set with mass ≥ p, by trying all sets of each size."""
    for size in range(1, len(probabilities) + 1):
        best = max(itertools.combinations(range(len(probabilities)), size), key=lambda c: sum(probabilities[i] for i in c))
        if sum(probabilities[i] for i in best) >= p:
            return set(best)


def test_greedy_is_the_argmax_over_all_rows_of_the_embedding():
    logits = jax.random.normal(jax.random.key(0), (5, 33))
    found = choose(logits, Sampling(), jnp.uint32(0), jnp.arange(5), jnp.int32(0), vocab_limit=2)
    chex.assert_trees_all_equal(found, logits.argmax(-1).astype(jnp.int32))


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.5), Sampling(2.0, top_k=600), Sampling(1.0, top_p=1.0)])
def test_frequencies_are_the_softmax(sampling):
    rng = np.random.default_rng(0)
    logits = np.full(600, -30.0)  # several blocks of the two-step draw
    logits[[0, 5, 255, 256, 300, 511, 512, 599]] = rng.normal(size=8)
    expected = np.asarray(jax.nn.softmax(logits / sampling.temperature))
    seen = np.bincount(draws(logits, sampling), minlength=600) / ROWS
    assert np.abs(seen - expected).max() < 4 * np.sqrt(0.25 / ROWS)  # four standard errors


def test_top_k_keeps_the_k_most_probable_in_their_proportions():
    logits = np.log([0.05, 0.4, 0.1, 0.25, 0.2])
    found = np.bincount(draws(logits, Sampling(1.0, top_k=2)), minlength=5) / ROWS
    np.testing.assert_allclose(found, [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0], atol=0.03)


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.75, 0.9, 0.9999, 1.0])
def test_nucleus_is_the_smallest_set_that_has_the_mass(p):
    probabilities = np.asarray(jax.nn.softmax(np.random.default_rng(1).normal(size=(8, 9)) * 2), np.float64)
    found = np.asarray(nucleus(jnp.log(probabilities), p))
    for row, line in enumerate(found):
        expected = set(range(9)) if p == 1.0 else smallest_set(probabilities[row], p)
        assert set(np.flatnonzero(line)) == expected


def test_nucleus_takes_no_more_of_equal_tokens_than_it_needs():
    assert nucleus(jnp.zeros((1, 8)), 0.5)[0].tolist() == [True] * 4 + [False] * 4
    assert nucleus(jnp.zeros((1, 8)), 0.501)[0].tolist() == [True] * 5 + [False] * 3
    mixed = jnp.log(jnp.array([[0.1, 0.4, 0.1, 0.4]]))
    assert nucleus(mixed, 0.85)[0].tolist() == [True, True, False, True]


def test_nucleus_with_impossible_tokens():
    logits = jnp.array([[-jnp.inf, 0.0, -jnp.inf, -200.0]])
    assert nucleus(logits, 0.9)[0].tolist() == [False, True, False, False]


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0, top_p=0.6), Sampling(1.0, top_k=4, top_p=0.6), Sampling(1.0, top_p=1e-6)]
)
def test_top_p_draws_from_the_nucleus_alone(sampling):
    probabilities = np.array([0.05, 0.4, 0.1, 0.25, 0.2])
    found = np.bincount(draws(np.log(probabilities), sampling), minlength=5) / ROWS
    expected = [0, 1, 0, 0, 0] if sampling.top_p < 0.1 else np.array([0, 0.4, 0, 0.25, 0]) / 0.65
    np.testing.assert_allclose(found, expected, atol=0.03)


def test_top_p_counts_what_top_k_left():
    """Of the two best, 0.4 and 0.25, the first alone has 61 % of what is left."""
    found = draws(np.log([0.05, 0.4, 0.1, 0.25, 0.2]), Sampling(1.0, top_k=2, top_p=0.6))
    assert set(found.tolist()) == {1}


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.99), Sampling(9.0, 50, 0.9)]
)
def test_rows_without_a_tokenizer_entry_are_never_sampled(sampling):
    logits = np.zeros(300)
    logits[280:] = 50.0
    assert draws(logits, sampling, rows=500, vocab_limit=280).max() < 280


def test_a_tiny_temperature_is_the_argmax_and_never_nan():
    logits = np.array([3.0, 3.5, -1e4, 3.4])
    for temperature in (1e-6, 1e-38, 5e-45):
        assert set(draws(logits, Sampling(temperature), rows=50).tolist()) == {1}


def test_a_row_depends_on_seed_row_and_step_alone():
    logits = jnp.asarray(np.random.default_rng(2).normal(size=(6, 500)), jnp.float32)
    rows = jnp.array([7, 3, 11, 0, 5, 2])
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=50), Sampling(1.0, top_p=0.9)):
        whole = RUN(logits, sampling, 1, rows, 4, 500)
        order = jnp.array([4, 2, 0])
        chex.assert_trees_all_equal(RUN(logits[order], sampling, 1, rows[order], 4, 500), whole[order])
        for seed, rows_, step in ((2, rows, 4), (1, rows + 1, 4), (1, rows, 5)):
            assert (np.asarray(RUN(logits, sampling, seed, rows_, step, 500)) != np.asarray(whole)).any()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(UserError, match=rf"config\.generate\.{field}: got .*, expected"):
        Sampling(**{field: value})
