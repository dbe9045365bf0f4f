"""Figures with their n and a 95 % interval: rates, means, paired differences, perplexity.

A rate gets Wilson's score interval: the bootstrap of 16 hits in 16 tries is [1, 1], which claims certainty; Wilson's is
[0.81, 1]. Everything else gets the percentile bootstrap over items, seeded, so that a report can be reproduced.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z = 1.959963984540054  # the 97.5 % point of the standard normal
DRAWS = 10_000
COUNTED = 500  # items up to which draws are kept as counts: 40 MB a number of items
CHUNK = 4_000_000  # resampled items held at once: 32 MB of indices


@dataclass(frozen=True)
class Figure:
    """A value over `n` items with its 95 % interval; `percent` says how it is printed.

    >>> print(rate([True, True, True, False]))
    75.0 % [30.1, 95.4] (n=4)

    Without items value, low and high are NaN, and null in JSON.
    """

    n: int
    value: float
    low: float
    high: float
    percent: bool = False

    def as_dict(self) -> dict[str, float | int | None]:
        """{"n", "value", "low", "high"} as report.json has it; rates stay in [0, 1]."""
        value, low, high = (x if math.isfinite(x) else None for x in (self.value, self.low, self.high))
        return {"n": self.n, "value": value, "low": low, "high": high}

    def parts(self) -> tuple[str, str, str]:
        """("93.8 %", "[89.2, 96.5]", "(n=160)"): what tables print, to be set apart where they can."""
        if self.n == 0:
            return "–", "", "(n=0)"
        scale, unit = (100, " %") if self.percent else (1, "")
        value, low, high = (_number(x * scale, self.percent) for x in (self.value, self.low, self.high))
        return f"{value}{unit}", f"[{low}, {high}]", f"(n={self.n})"

    def __str__(self) -> str:
        return " ".join(part for part in self.parts() if part)


def rate(hits: Sequence[bool] | np.ndarray) -> Figure:
    """Share of true items with Wilson's score interval (Wilson 1927).

        >>> rate([True] * 16).low
        0.8064...

    Raises ValueError where an item is neither 0 nor 1.
    """
    hits = _binary(hits)
    n = len(hits)
    if n == 0:
        return _empty(percent=True)
    p = float(hits.mean())
    centre = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    # at 0 and 1 the bound is exact; rounding must not put it past the value
    return Figure(n, p, min(p, max(0.0, centre - half)), max(p, min(1.0, centre + half)), percent=True)


def mean(values: Sequence[float] | np.ndarray, *, seed: int = 0, percent: bool = False) -> Figure:
    """Mean with its percentile bootstrap interval over items; one item, or equal items, give an interval of width 0."""
    values = np.asarray(values, np.float64)
    return _bootstrap(values, np.ones_like(values), seed=seed, percent=percent)


def ratio(
    totals: Sequence[float] | np.ndarray, counts: Sequence[float] | np.ndarray, *, seed: int = 0, percent: bool = False
) -> Figure:
    """Sum of totals / sum of counts, with the percentile bootstrap over items: a rate over parts that belong together.

        >>> ratio([1, 2], [1, 3]).value      # 3 of 4 instructions in 2 prompts
        0.75

    Raises ValueError where the two differ in length or a count is not positive.
    """
    totals, counts = _paired(np.asarray(totals, np.float64), np.asarray(counts, np.float64))
    if (counts <= 0).any():
        raise ValueError("a ratio needs a positive count for every item")
    return _bootstrap(totals, counts, seed=seed, percent=percent)


def paired_difference(
    before: Sequence[float] | np.ndarray, after: Sequence[float] | np.ndarray, *, seed: int = 0, percent: bool = False
) -> Figure:
    """Mean of `after - before` over the same items, resampled in pairs; positive where `after` is larger.

        >>> paired_difference([0.0, 1.0], [0.5, 1.5]).value
        0.5

    Raises ValueError where the two differ in length. For hits and misses use `paired_rate_difference`.
    """
    before, after = _paired(np.asarray(before, np.float64), np.asarray(after, np.float64))
    return mean(after - before, seed=seed, percent=percent)


def paired_rate_difference(before: Sequence[bool] | np.ndarray, after: Sequence[bool] | np.ndarray) -> Figure:
    """Difference of two rates on the same items, with the interval of Agresti and Min (2005).

    Half an item is added to each cell of the two-by-two table, so that two systems that agree everywhere on 20 items do
    not get [0, 0], as the bootstrap would have it.

        >>> paired_rate_difference([False] * 4, [True, True, True, False]).value
        0.75
    """
    before, after = _paired(_binary(before), _binary(after))
    n = len(before)
    if n == 0:
        return _empty(percent=True)
    gained, lost = int((after & ~before).sum()), int((before & ~after).sum())
    total, up, down = n + 2.0, gained + 0.5, lost + 0.5
    centre = (up - down) / total
    half = Z * math.sqrt(up + down - (up - down) ** 2 / total) / total
    return Figure(n, (gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half), percent=True)


def perplexity(logprobs: Sequence[float] | np.ndarray, tokens: Sequence[int] | np.ndarray, *, seed: int = 0) -> Figure:
    """exp(-sum of log-probabilities / sum of tokens) from each text's two sums, in nats; bootstrap over texts.

        >>> perplexity([2 * math.log(0.5), math.log(0.5)], [2, 1]).value
        2.0

    The paired ratio of two models' perplexities on the same texts is `perplexity(after - before, tokens)`, where
    `before` and `after` are their log-probability sums.
    """
    logprobs, tokens = _paired(np.asarray(logprobs, np.float64), np.asarray(tokens, np.float64))
    if (tokens <= 0).any():
        raise ValueError("perplexity needs at least one token in every text")
    figure = _bootstrap(-logprobs, tokens, seed=seed, percent=False)
    return Figure(figure.n, *(float(np.exp(x)) for x in (figure.value, figure.low, figure.high)))


def first_reached(at: Sequence[float], values: Sequence[float], level: float) -> float | None:
    """Where straight lines through (at, values) first reach a level from below; None where they never do.

    >>> first_reached([100, 200, 400], [0.5, 0.8, 1.0], 0.9)
    300.0
    """
    before = None
    for x, value in zip(at, values, strict=True):
        if value >= level:
            return float(x) if before is None else before[0] + (x - before[0]) * (level - before[1]) / (value - before[1])
        before = x, value
    return None


def _bootstrap(numerators: np.ndarray, denominators: np.ndarray, *, seed: int, percent: bool) -> Figure:
    """Ratio of sums over items, [n] and [n], with its percentile interval over resampled items."""
    n = len(numerators)
    if n == 0:
        return _empty(percent)
    if n <= COUNTED:  # many figures are over as many items: the same draws serve all of them
        drawn = _drawn(seed, n)
        ratios = [(drawn @ numerators) / (drawn @ denominators)]
    else:
        generator, ratios = np.random.default_rng(seed), []
        rows = max(1, CHUNK // n)
        for start in range(0, DRAWS, rows):
            picked = generator.integers(0, n, size=(min(rows, DRAWS - start), n))
            ratios.append(numerators[picked].sum(-1) / denominators[picked].sum(-1))
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return Figure(n, float(numerators.sum() / denominators.sum()), float(low), float(high), percent)


@functools.lru_cache(maxsize=32)
def _drawn(seed: int, n: int) -> np.ndarray:
    """[DRAWS, n]: how often each draw has each item."""
    picked = np.random.default_rng(seed).integers(0, n, size=(DRAWS, n))
    flat = (picked + n * np.arange(DRAWS)[:, None]).ravel()
    return np.bincount(flat, minlength=DRAWS * n).reshape(DRAWS, n).astype(np.float64)


def _paired(before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if before.shape != after.shape:
        raise ValueError(f"paired items must be as many: {len(before)} and {len(after)}")
    return before, after


def _binary(hits: Sequence[bool] | np.ndarray) -> np.ndarray:
    hits = np.asarray(hits, np.float64)
    if not np.isin(hits, (0.0, 1.0)).all():
        raise ValueError("a rate is taken over hits and misses (0 or 1); for other values use mean")
    return hits.astype(bool)


def _empty(percent: bool) -> Figure:
    return Figure(0, math.nan, math.nan, math.nan, percent)


def _number(x: float, percent: bool) -> str:
    """One decimal in per cent, else four significant digits."""
    if not math.isfinite(x):
        return "–"
    if percent:
        return f"{x:.1f}" if round(x, 1) else "0.0"
    return f"{x:.4g}" if abs(x) < 1000 else f"{x:,.0f}"
