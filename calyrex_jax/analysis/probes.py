"""Linear probes: can the rule be read off a state by one hyperplane?

    probe = fit(features, facts, ProbeSettings())           # features [n, 2, D]: of both conversations of n pairs
    probe.accuracy        # [n], of 0, 1/2 and 1: how many of a pair's two conversations were told rightly
    probe.shuffled        # [permutations]: mean accuracies where each pair's two labels were swapped at random

Ridge regression on labels -1 and +1, with standardised features, in closed form and float64: there are far fewer
conversations than dimensions, so that almost every direction separates what it was fitted on. Hence the folds hold out whole
facts, and penalty, means and scales come from the training part of each fold alone. Closed form needs no iterations,
gives the same figures everywhere, and lets a hundred shuffled labellings share one decomposition. Swapping labels within
pairs keeps both classes of equal size in every fold; a shuffle over all would lean below one half where folds are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

_PENALTIES = 10.0 ** np.arange(-4, 4)  # times the mean of the kernel's diagonal
_INNER_FOLDS = 4
_FLAT = 1e-6  # a feature whose spread is below this share of its size is rounding


@dataclass(frozen=True)
class ProbeSettings:
    """folds of the cross-validation, shuffled labellings of the control, and the seed of both."""

    folds: int = 6
    permutations: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Probe:
    """What a probe reached on held-out facts; see the module's docstring."""

    accuracy: np.ndarray
    shuffled: np.ndarray

    @property
    def p_value(self) -> float:
        """The share of labellings, the true one among them, that do at least as well as the true one."""
        return float((1 + (self.shuffled >= self.accuracy.mean()).sum()) / (1 + len(self.shuffled)))

    @property
    def chance(self) -> tuple[float, float, float]:
        """Mean of the shuffled labellings' accuracies, and the range that holds 95 % of them."""
        low, high = np.percentile(self.shuffled, [2.5, 97.5])
        return float(self.shuffled.mean()), float(low), float(high)


def fit(features: np.ndarray, facts: Sequence[str], settings: ProbeSettings) -> Probe:
    """Cross-validated probes of features [n, 2, D]; `facts` [n] are held out whole."""
    # matrices are small: two threads take thirty times one's processor time, and minutes where the machine is shared
    with threadpool_limits(1, "blas"):
        return _fit(features, facts, settings)


def _fit(features: np.ndarray, facts: Sequence[str], settings: ProbeSettings) -> Probe:
    n = len(features)
    rng = np.random.default_rng(settings.seed)
    x = np.asarray(features, np.float64).reshape(2 * n, -1)
    swaps = np.concatenate([np.ones((n, 1)), rng.choice([-1.0, 1.0], size=(n, settings.permutations))], axis=1)
    labels = np.stack([swaps, -swaps], axis=1).reshape(2 * n, -1)
    fold = np.repeat(_folds(facts, settings.folds, rng), 2)
    right = np.zeros_like(labels)
    for held in np.unique(fold):
        train, test = np.flatnonzero(fold != held), np.flatnonzero(fold == held)
        inner = _folds([facts[i // 2] for i in train[::2]], _INNER_FOLDS, rng)
        penalty = _best_penalty(x[train], labels[train], np.repeat(inner, 2))
        said = _predict(x[train], labels[train], x[test])[penalty, :, np.arange(labels.shape[1])].T
        right[test] = 0.5 + 0.5 * np.sign(said) * labels[test]
    by_pair = right.reshape(n, 2, -1).mean(1)
    return Probe(by_pair[:, 0], by_pair[:, 1:].mean(0))


def _folds(facts: Sequence[str], count: int, rng: np.random.Generator) -> np.ndarray:
    """A fold for each entry: whole facts, at random, in folds of nearly equal size."""
    names = sorted(set(facts))
    order = rng.permutation(len(names))
    number = {names[fact]: at % min(count, len(names)) for at, fact in enumerate(order)}
    return np.array([number[fact] for fact in facts])


def _best_penalty(x: np.ndarray, labels: np.ndarray, fold: np.ndarray) -> np.ndarray:
    """For each column of labels the index of the penalty with the least squared error over the folds."""
    errors = np.zeros((len(_PENALTIES), labels.shape[1]))
    for held in np.unique(fold):
        train, test = fold != held, fold == held
        errors += np.square(_predict(x[train], labels[train], x[test]) - labels[test]).sum(1)
    return len(_PENALTIES) - 1 - np.argmin(errors[::-1], axis=0)  # of equals, the strongest


def _predict(train: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Ridge predictions for `test` under every penalty, [penalties, test rows, columns of labels]."""
    mean, spread = train.mean(0), train.std(0)
    used = spread > _FLAT * np.maximum(np.abs(mean), np.finfo(np.float32).tiny)
    if not used.any():
        return np.broadcast_to(labels.mean(0), (len(_PENALTIES), len(test), labels.shape[1]))
    train, test = ((part[:, used] - mean[used]) / spread[used] for part in (train, test))
    kernel = train @ train.T
    values, vectors = np.linalg.eigh(kernel)
    turned, seen = vectors.T @ (labels - labels.mean(0)), test @ train.T @ vectors
    scales = 1 / (np.maximum(values, 0) + _PENALTIES[:, None] * np.trace(kernel) / len(kernel))
    return labels.mean(0) + np.einsum("ts,ps,sc->ptc", seen, scales, turned, optimize=True)
