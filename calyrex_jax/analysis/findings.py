"""What an analysis found: figures by point in depth, landmarks, arrays."""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calyrex_jax.analysis import probes
from calyrex_jax.analysis.attention import ROLES, Maps
from calyrex_jax.analysis.patching import PATCHES, PLACES, Measured
from calyrex_jax.analysis.probes import Probe, ProbeSettings
from calyrex_jax.analysis.states import Point
from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import stats
from calyrex_jax.evals.stats import Figure

HALF = 0.5
READABLE = 0.9  # a probe's accuracy from which a rule counts as readable
_DRAWS = 2000

# every array of analysis/arrays.npz; P points in depth, n pairs, axis `rule` is (A, B)
ARRAYS = {
    "points": "[P] names of the points: '26' after 26 layers, '26+' after the adapter's block there too",
    "boundary": "[P] layers before the point",
    "adapted": "[P] whether it lies behind the adapter's block",
    "facts": "[n] what each pair's question is about",
    "places": "[2] where states are compared: the prompt's last position, the answer's positions",
    "patches": "[2] what is replaced: everything after the system text, the system text",
    "distance": "[P, n, places] |h_A - h_B| over the mean of both norms",
    "cosine": "[P, n, places] cosine of h_A and h_B",
    "probe_accuracy": "[P, places, n] share of the pair's two conversations told rightly by a probe fitted on other facts",
    "probe_shuffled": "[P, places, permutations] mean accuracy with each pair's labels swapped at random",
    "logprob_own": "[n, rule] of the rule-following reply under its rule, nats",
    "logprob_other": "[n, rule] of the same reply under the other rule",
    "logprob_patched": "[patches, P, n, rule] of the same reply under its rule, states of the other run in one place",
    "attention_boundaries": "[blocks] where the CAL blocks stand",
    "attention_distances": "[distances] tokens of neutral text between system prompt and question",
    "attention_roles": "[roles] parts of the system text: the word to copy, the rest of the rule's sentence, all else",
    "attention_mass": "[blocks, heads, roles, distances, m] mean attention of the positions that predict the reply",
    "attention_share": "[roles, distances, m] share of the system text's tokens",
    "attention_added": "[blocks, distances, m] norm of what a block adds over the norm of the stream",
    "attention_example_0": "[blocks, heads, positions, tokens] weights of one conversation; tokens: attention_tokens_0",
    "attention_example_1": "likewise, another conversation",
    "attention_tokens_0": "[tokens] the system text's tokens",
    "attention_tokens_1": "likewise, another conversation",
}


@dataclass(frozen=True)
class Layer:
    """One point in depth; keys are PLACES for distance, cosine, probe and shuffled, PATCHES for nats and effect.

    shuffled   Figure over the shuffled labellings: mean, and the range of 95 % of them
    nats       how far the patch lowers the reply's log-probability
    effect     the same as a share of what the other rule's whole run does; None where that is not reliably positive
    """

    point: Point
    distance: dict[str, Figure]
    cosine: dict[str, Figure]
    probe: dict[str, Figure]
    shuffled: dict[str, Figure]
    p_value: dict[str, float]
    nats: dict[str, Figure]
    effect: dict[str, Figure | None]


@dataclass(frozen=True)
class Findings:
    """All points; whole: the log-probability, in nats, by which the reply falls under the other rule."""

    layers: tuple[Layer, ...]
    whole: Figure
    probes: dict[str, tuple[Probe, ...]]


def summarise(
    points: Sequence[Point],
    facts: Sequence[str],
    found: Measured,
    settings: ProbeSettings,
    advance: Callable[[int], None] = lambda _: None,
) -> Findings:
    """Fits the probes and makes figures; intervals are 95 % bootstraps over pairs."""
    seed = settings.seed
    whole = (found.own - found.other).mean(-1)
    fitted: dict[str, list[Probe]] = {place: [] for place in PLACES}
    layers = []
    for at, point in enumerate(points):
        for number, place in enumerate(PLACES):
            fitted[place].append(probes.fit(found.features[at, :, :, number], facts, settings))
        here = {place: fitted[place][-1] for place in PLACES}
        falls = {patch: (found.own - found.patched[i, at]).mean(-1) for i, patch in enumerate(PATCHES)}
        layers.append(
            Layer(
                point,
                {place: stats.mean(found.distance[at, :, i], seed=seed) for i, place in enumerate(PLACES)},
                {place: stats.mean(found.cosine[at, :, i], seed=seed) for i, place in enumerate(PLACES)},
                {place: stats.mean(probe.accuracy, seed=seed, percent=True) for place, probe in here.items()},
                {place: Figure(len(p.shuffled), *p.chance, percent=True) for place, p in here.items()},
                {place: probe.p_value for place, probe in here.items()},
                {patch: stats.mean(fall, seed=seed) for patch, fall in falls.items()},
                {patch: share(fall, whole, seed) for patch, fall in falls.items()},
            )
        )
        advance(1)
    return Findings(tuple(layers), stats.mean(whole, seed=seed), {place: tuple(p) for place, p in fitted.items()})


def share(parts: np.ndarray, wholes: np.ndarray, seed: int = 0) -> Figure | None:
    """Sum of parts over sum of wholes, [n] each, with its bootstrap interval over pairs; None where the sum of wholes is
    not positive in 97.5 % of the resamples: a share of next to nothing has no meaning.
    """
    picked = np.random.default_rng(seed).integers(0, len(parts), size=(_DRAWS, len(parts)))
    bottom = wholes[picked].sum(-1)
    if wholes.sum() <= 0 or np.percentile(bottom, 2.5) <= 0:
        return None
    kept = bottom > 0
    low, high = np.percentile(parts[picked].sum(-1)[kept] / bottom[kept], [2.5, 97.5])
    return Figure(len(parts), float(parts.sum() / wholes.sum()), float(low), float(high))


def landmarks(found: Findings) -> dict[str, str | None]:
    """Names of the points where the rule passes from one place to the other; None where it never does.

    readable_last_prompt, readable_answer   the first point at which a probe tells READABLE of the conversations rightly
    question_takes_over   the first point from which on the question's and reply's states carry HALF of the effect
    system_lets_go        the first point from which on replacing the system text's states does less than HALF
    largest_step          the point at which the question's effect grows most over the point before
    """
    names = [str(layer.point) for layer in found.layers]

    def first(holds: Sequence[bool], lasting: bool = True) -> str | None:
        places = [i for i in range(len(names)) if (all(holds[i:]) if lasting else holds[i])]
        return names[places[0]] if places else None

    marks = {
        f"readable_{place}": first([layer.probe[place].value >= READABLE for layer in found.layers], lasting=False)
        for place in PLACES
    }
    question, system = ([layer.effect[patch] for layer in found.layers] for patch in PATCHES)
    if None in question or None in system:
        return marks | dict.fromkeys(("question_takes_over", "system_lets_go", "largest_step"))
    marks["question_takes_over"] = first([effect.value >= HALF for effect in question])
    marks["system_lets_go"] = first([effect.value < HALF for effect in system])
    marks["largest_step"] = names[1 + int(np.argmax(np.diff([effect.value for effect in question])))]
    return marks


def as_json(found: Findings, seen: Maps | None) -> dict:
    """report.json's part of an analysis, as documented by Layer, landmarks and Maps."""
    layers = []
    for layer in found.layers:
        probe = {
            place: layer.probe[place].as_dict() | {"shuffled": layer.shuffled[place].as_dict(), "p": layer.p_value[place]}
            for place in PLACES
        }
        patch = {name: {"nats": layer.nats[name], "effect": layer.effect[name]} for name in PATCHES}
        where = {"point": str(layer.point), "boundary": layer.point.boundary, "adapted": layer.point.adapted}
        layers.append(where | {"distance": layer.distance, "cosine": layer.cosine, "probe": probe, "patch": patch})
    made = {"whole_effect_nats": found.whole, "landmarks": landmarks(found), "layers": layers}
    if seen is not None:
        made["attention"] = attention_figures(seen)
    return made


def attention_figures(seen: Maps, seed: int = 0) -> dict:
    """{"26": {"0": {"word": Figure, "rule": …, "rest": …, "added": …}}}: by boundary and distance, mean over heads."""
    found: dict = {"share": {}}
    for d, distance in enumerate(seen.distances):
        found["share"][str(distance)] = {role: stats.mean(seen.share[r, d], seed=seed) for r, role in enumerate(ROLES)}
    for b, boundary in enumerate(seen.boundaries):
        found[str(boundary)] = {}
        for d, distance in enumerate(seen.distances):
            cell = {role: stats.mean(seen.mass[b, :, r, d].mean(0), seed=seed) for r, role in enumerate(ROLES)}
            found[str(boundary)][str(distance)] = cell | {"added": stats.mean(seen.added[b, d], seed=seed)}
    return found


def arrays(points: Sequence[Point], facts: Sequence[str], measured: Measured, found: Findings, seen: Maps | None) -> dict:
    """What arrays.npz holds, by the names of ARRAYS."""
    made = {
        "points": np.array([str(point) for point in points]),
        "boundary": np.array([point.boundary for point in points]),
        "adapted": np.array([point.adapted for point in points]),
        "facts": np.array(list(facts)),
        "places": np.array(PLACES),
        "patches": np.array(PATCHES),
        "distance": measured.distance,
        "cosine": measured.cosine,
        "probe_accuracy": np.stack([[p.accuracy for p in found.probes[place]] for place in PLACES], axis=1),
        "probe_shuffled": np.stack([[p.shuffled for p in found.probes[place]] for place in PLACES], axis=1),
        "logprob_own": measured.own,
        "logprob_other": measured.other,
        "logprob_patched": measured.patched,
    }
    if seen is not None:
        made |= {
            "attention_boundaries": np.array(seen.boundaries),
            "attention_distances": np.array(seen.distances),
            "attention_roles": np.array(ROLES),
            "attention_mass": seen.mass,
            "attention_share": seen.share,
            "attention_added": seen.added,
        }
        for i, (reading, weights) in enumerate(seen.examples):
            made[f"attention_example_{i}"] = weights
            strings = [text for text, inside in zip(reading.strings, reading.system) if inside]
            made[f"attention_tokens_{i}"] = np.array(strings)
    return made


def write_arrays(path: Path, content: dict[str, np.ndarray]) -> None:
    """Writes an .npz whole or not at all; UserError where the place cannot be written."""
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **content)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(buffer.getbuffer())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); free the disk") from error
