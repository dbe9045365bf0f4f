"""Intervals against published or hand-computed values, and their coverage on simulated data."""

import math

import numpy as np
import pytest

from calyrex_jax.evals import stats
from calyrex_jax.evals.stats import Figure


def test_wilson_against_published_values():
    # Newcombe (1998), table I: 81/263 and 15/148, method 3
    figure = stats.rate([True] * 81 + [False] * (263 - 81))
    assert (round(figure.low, 4), round(figure.high, 4)) == (0.2553, 0.3662)
    figure = stats.rate([True] * 15 + [False] * (148 - 15))
    assert (round(figure.low, 4), round(figure.high, 4)) == (0.0624, 0.1605)
    # 0 of 20
    figure = stats.rate([False] * 20)
    assert (figure.value, figure.low, round(figure.high, 4)) == (0.0, 0.0, 0.1611)


@pytest.mark.parametrize("n", [1, 3, 7, 16, 160, 997])
def test_wilson_holds_its_value_at_the_ends(n):
    none, every = stats.rate(np.zeros(n, bool)), stats.rate(np.ones(n, bool))
    assert none.low == 0.0 < none.high < 1.0
    assert every.high == 1.0 > every.low > 0.0
    np.testing.assert_allclose(every.low, 1 - none.high)


def test_rate_refuses_what_is_no_hit_or_miss():
    with pytest.raises(ValueError, match="use mean"):
        stats.rate([0.5, 1.0])
    with pytest.raises(ValueError, match="use mean"):
        stats.rate([math.nan, 1.0])


def test_mean_interval_is_the_normal_one_for_many_items():
    values = np.random.default_rng(1).normal(3.0, 2.0, size=2000)
    figure = stats.mean(values)
    half = 1.96 * values.std() / math.sqrt(len(values))
    np.testing.assert_allclose(figure.value, values.mean())
    np.testing.assert_allclose([figure.low, figure.high], [values.mean() - half, values.mean() + half], atol=0.1 * half)


def test_mean_covers_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(2)
    hits = 0
    for trial in range(200):
        figure = stats.mean(generator.exponential(1.0, size=60), seed=trial)
        hits += figure.low <= 1.0 <= figure.high
    assert 175 <= hits <= 199


def test_bootstrap_is_seeded_and_chunked(monkeypatch):
    values = np.random.default_rng(3).normal(size=50)
    whole = stats.mean(values, seed=5)
    assert stats.mean(values, seed=5) == whole
    assert stats.mean(values, seed=6).low != whole.low
    monkeypatch.setattr(stats, "CHUNK", 50 * 7)
    assert stats.mean(values, seed=5) == whole


def test_one_item_gives_width_zero():
    assert stats.mean([2.5]) == Figure(1, 2.5, 2.5, 2.5)


def test_pairs_narrow_the_interval():
    generator = np.random.default_rng(4)
    difficulty = generator.normal(0, 10, size=100)
    before = difficulty + generator.normal(0, 0.1, size=100)
    after = difficulty + 1.0 + generator.normal(0, 0.1, size=100)
    figure = stats.paired_difference(before, after)
    assert 0.9 < figure.low < figure.value < figure.high < 1.1
    swapped = stats.paired_difference(after, before)
    np.testing.assert_allclose([swapped.value, swapped.low, swapped.high], [-figure.value, -figure.high, -figure.low])
    with pytest.raises(ValueError, match="as many: 100 and 99"):
        stats.paired_difference(before, after[:-1])


def test_paired_rates_by_hand():
    # 10 items: 4 gained, 1 lost; adjusted 4.5 and 1.5 of 12
    before = np.array([0, 0, 0, 0, 1, 1, 1, 0, 0, 0], bool)
    after = np.array([1, 1, 1, 1, 0, 1, 1, 0, 0, 0], bool)
    figure = stats.paired_rate_difference(before, after)
    half = 1.959964 * math.sqrt(6 - 9 / 12) / 12
    np.testing.assert_allclose([figure.value, figure.low, figure.high], [0.3, 0.25 - half, 0.25 + half], rtol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5, 20, 300])
def test_paired_rates_at_the_ends(n):
    nothing, every = np.zeros(n, bool), np.ones(n, bool)
    same = stats.paired_rate_difference(nothing, nothing)
    assert same.value == 0.0 and same.low < 0.0 < same.high
    most = stats.paired_rate_difference(nothing, every)
    assert most.value == most.high == 1.0 and most.low < 1.0


def test_perplexity_weights_tokens_and_not_texts():
    logprobs, tokens = np.log([0.5]) * np.array([1, 9]) + [0.0, math.log(0.1)], np.array([1, 9])
    figure = stats.perplexity(logprobs, tokens)
    np.testing.assert_allclose(figure.value, math.exp(-logprobs.sum() / 10))
    assert figure.low <= figure.value <= figure.high
    # the ends are the two texts on their own
    np.testing.assert_allclose([figure.low, figure.high], np.exp(-logprobs / tokens))


def test_perplexity_ratio_of_equal_models_is_one():
    logprobs = np.random.default_rng(6).normal(-50, 10, size=40)
    assert stats.perplexity(logprobs - logprobs, np.full(40, 20)) == Figure(40, 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="at least one token"):
        stats.perplexity([0.0], [0])


def test_no_items():
    for figure in (stats.rate([]), stats.mean([]), stats.paired_rate_difference([], []), stats.perplexity([], [])):
        assert figure.as_dict() == {"n": 0, "value": None, "low": None, "high": None}
        assert str(figure) == "– (n=0)"


def test_printed_form():
    assert str(Figure(160, 0.9375, 0.8921, 0.9649, percent=True)) == "93.8 % [89.2, 96.5] (n=160)"
    assert str(Figure(3, 12.34567, 11.0, 13.5)) == "12.35 [11, 13.5] (n=3)"
    assert str(Figure(3, 12345.6, 11000, 13500)) == "12,346 [11,000, 13,500] (n=3)"
    assert str(Figure(9, -0.0001, -0.1, 0.1, percent=True)) == "0.0 % [-10.0, 10.0] (n=9)"
    assert Figure(160, 0.9375, 0.8921, 0.9649, percent=True).as_dict() == {
        "n": 160,
        "value": 0.9375,
        "low": 0.8921,
        "high": 0.9649,
    }


def test_a_ratio_weighs_items_by_their_counts_and_resamples_them_whole():
    figure = stats.ratio([1, 2], [1, 3], percent=True)
    assert (figure.n, figure.value, figure.percent) == (2, 0.75, True)
    # only three draws exist: the first twice, the second twice, one of each
    assert (figure.low, figure.high) == (2 / 3, 1.0)
    assert stats.ratio([3.0, 5.0], [1, 1]) == stats.mean([3.0, 5.0])
    with pytest.raises(ValueError, match="positive count"):
        stats.ratio([1], [0])
