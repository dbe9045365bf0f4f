import numpy as np
import pytest

from calyrex_jax.analysis import probes
from calyrex_jax.analysis.probes import ProbeSettings

FACTS = [f"fact {i}" for i in range(30)]


def features(seed, signal=0.0, dims=200, n=30):
    """Questions differ in every dimension; the rule moves eight of them, and there is noise besides."""
    rng = np.random.default_rng(seed)
    base = np.repeat(3 * rng.normal(size=(n, 1, dims)), 2, axis=1) + rng.normal(size=(n, 2, dims))
    base[:, 0, :8] += signal
    base[:, 1, :8] -= signal
    return base


@pytest.mark.parametrize("seed", range(3))
def test_without_a_signal_the_probe_stays_at_chance(seed):
    """Far fewer conversations than dimensions: in training any labelling is separable, held-out facts are not."""
    probe = probes.fit(features(seed), FACTS, ProbeSettings(permutations=200))
    mean, low, high = probe.chance
    assert low <= probe.accuracy.mean() <= high
    assert abs(mean - 0.5) < 0.03 and 0.3 < low < 0.5 < high < 0.7
    assert probe.p_value > 0.025


def test_a_strong_signal_is_found_and_its_shuffled_labels_are_not():
    probe = probes.fit(features(0, signal=30.0), FACTS, ProbeSettings())
    assert probe.accuracy.mean() == 1.0 and probe.p_value == 1 / 101
    mean, low, high = probe.chance
    # swapped labels of two clusters can only be told as one guesses a coin
    assert abs(mean - 0.5) < 0.06 and low <= 0.5 <= high


def test_states_that_do_not_differ_are_told_as_often_as_not():
    same = np.repeat(np.random.default_rng(0).normal(size=(30, 1, 50)), 2, axis=1)
    probe = probes.fit(same, FACTS, ProbeSettings(permutations=5))
    assert (probe.accuracy == 0.5).all() and (probe.shuffled == 0.5).all() and probe.p_value == 1.0
    constant = probes.fit(np.ones((30, 2, 5)), FACTS, ProbeSettings(permutations=5))
    assert (constant.accuracy == 0.5).all()


def test_whole_facts_are_held_out():
    """A signal whose direction is each fact's own is found only where facts are in both parts."""
    rng = np.random.default_rng(3)
    own = rng.normal(size=(10, 1, 400)) * np.array([1.0, -1.0])[None, :, None]
    x = np.concatenate([own] * 3) + 0.1 * rng.normal(size=(30, 2, 400))
    grouped = probes.fit(x, [f"fact {i % 10}" for i in range(30)], ProbeSettings(folds=5, permutations=20))
    loose = probes.fit(x, FACTS, ProbeSettings(folds=10, permutations=20))
    assert loose.accuracy.mean() > 0.95
    assert grouped.accuracy.mean() < 0.8


def test_ridge_is_the_textbook_solution():
    rng = np.random.default_rng(2)
    train, test, labels = rng.normal(size=(8, 5)) + 2, rng.normal(size=(3, 5)), rng.choice([-1.0, 1.0], (8, 2))
    said = probes._predict(train, labels, test)
    mean, spread = train.mean(0), train.std(0)
    x, z = (train - mean) / spread, (test - mean) / spread
    for i, strength in enumerate(probes._PENALTIES):
        penalty = strength * np.trace(x @ x.T) / 8
        weights = np.linalg.solve(x.T @ x + penalty * np.eye(5), x.T @ (labels - labels.mean(0)))
        np.testing.assert_allclose(said[i], labels.mean(0) + z @ weights, rtol=1e-6, atol=1e-9)


def test_the_same_seed_gives_the_same_figures():
    a, b = (probes.fit(features(0, 2.0), FACTS, ProbeSettings(permutations=10)) for _ in range(2))
    np.testing.assert_array_equal(a.accuracy, b.accuracy)
    np.testing.assert_array_equal(a.shuffled, b.shuffled)
