"""How well scores tell two classes apart: accuracy, F1, AUROC and calibration, in plain numpy."""

from __future__ import annotations

import numpy as np

from calyrex_jax.core.errors import UserError


def binary_metrics(scores: np.ndarray, labels: np.ndarray, what: str = "validation", bins: int = 10) -> dict[str, float]:
    """accuracy, f1, auroc and ece of scores [n] (harmful above 0) against labels [n] (1 harmful, 0 safe).

        >>> binary_metrics(np.array([2.0, -1.0, 3.0, -2.0]), np.array([1, 1, 1, 0]))["accuracy"]
        0.75

    f1 is that of the harmful class; auroc counts ties as half; ece is the expected calibration error of sigmoid(score) over
    `bins` equal parts of [0, 1]: the mean over examples of |mean probability - share of harmful ones| of their part.
    Raises UserError where the labels are of one class only, ValueError where a score is not finite.
    """
    scores, labels = np.asarray(scores, np.float64), np.asarray(labels) > 0.5
    if scores.shape != labels.shape or scores.ndim != 1:
        raise ValueError(f"{what}: scores {scores.shape} and labels {labels.shape} are not two lists of one length")
    if not np.isfinite(scores).all():
        raise ValueError(f"{what}: {int((~np.isfinite(scores)).sum())} of {len(scores)} scores are not finite")
    if labels.all() or not labels.any():
        got = "no example" if not len(labels) else f"{len(labels)} examples, all {'harmful' if labels.all() else 'safe'}"
        raise UserError(f"{what}: {got}; both classes are needed; mix harmful and safe examples in the data")
    said = scores > 0
    hits = int((said & labels).sum())
    return {
        "accuracy": float((said == labels).mean()),
        "f1": 2 * hits / int(said.sum() + labels.sum()),
        "auroc": auroc(scores, labels),
        "ece": calibration_error(1 / (1 + np.exp(-np.clip(scores, -60, 60))), labels, bins),
    }


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """How often a harmful example scores above a safe one, ties being half; both classes must be there."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # equal scores share the mean of their ranks
    harmful = int(labels.sum())
    wins = ranks[labels].sum() - harmful * (harmful + 1) / 2
    return float(wins / (harmful * (len(labels) - harmful)))


def calibration_error(probabilities: np.ndarray, labels: np.ndarray, bins: int) -> float:
    """The expected calibration error of `binary_metrics`."""
    part = np.minimum((probabilities * bins).astype(int), bins - 1)
    gaps = np.bincount(part, probabilities - labels, minlength=bins)
    return float(np.abs(gaps).sum() / len(labels))
