"""An analysis as report.html and as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from calyrex_jax.analysis.attention import Maps
from calyrex_jax.analysis.findings import ARRAYS, HALF, READABLE, Findings, landmarks
from calyrex_jax.analysis.pairs import Pair
from calyrex_jax.analysis.patching import PATCHES, PLACES
from calyrex_jax.evals import plots, stats
from calyrex_jax.evals.report import Report, text_table

_DEPTH = "layers before the point; +½: after the adapter's block there as well"
_NAMES = {"last_prompt": "last position of the prompt", "answer": "positions of the answer"}
_PATCH_NAMES = {"question": "question and reply patched", "system": "system text patched"}


def write(directory: Path, about: str, pairs: Sequence[Pair], found: Findings, seen: Maps | None) -> str:
    """Writes DIR/report.html; returns the terminal's table. `about` says what was analysed and how."""
    report = Report("Analysis: where the rule lives")
    report.text(about)
    report.text(told(found), title="In short")
    _depth(report, found)
    if seen is not None:
        _attention(report, seen)
    columns, rows = table(found)
    report.table(
        "All points",
        columns,
        rows,
        "Distance and probe at the prompt's last position / the answer's. Effects as shares. p: share of shuffled labellings "
        "that do as well as the true one, at the answer.",
    )
    for number, pair in enumerate(pairs[:3], 1):
        text = f"A  {pair.systems[0]}\nB  {pair.systems[1]}\n   {pair.question}\nA  {pair.replies[0]}\nB  {pair.replies[1]}"
        report.text(text, title=f"Pair {number}", verbatim=True)
    width = max(map(len, ARRAYS))
    listed = "\n".join(f"{name:<{width}}  {text}" for name, text in ARRAYS.items())
    report.text(listed, title="analysis/arrays.npz", verbatim=True)
    report.write_html(directory / "report.html")
    return text_table(columns, rows)


def told(found: Findings) -> str:
    """The landmarks in words."""
    marks = landmarks(found)
    last = found.layers[-1]
    lines = [f"Under the other rule, the rule-following reply is less likely by {found.whole} nats."]
    if marks["question_takes_over"] is None and marks["largest_step"] is None:
        lines.append(
            "That is not reliably above 0: the model does not follow these rules, and shares of the effect mean nothing."
        )
    else:
        lines.append(
            f"From point {marks['question_takes_over'] or last.point} on, the states of question and reply carry at least half of the "
            f"effect; they gain most at point {marks['largest_step']}. From point {marks['system_lets_go'] or last.point} on, "
            "what stands at the system text's own positions decides less than half of it."
        )
    for place in PLACES:
        where, name = marks[f"readable_{place}"], _NAMES[place]
        best = max(layer.probe[place].value for layer in found.layers)
        lines.append(
            f"At the {name} a linear probe tells which rule holds in {READABLE:.0%} of the conversations from point {where} on."
            if where
            else f"At the {name} no linear probe reaches {READABLE:.0%}; the best has {best:.1%}."
        )
    return " ".join(lines)


def table(found: Findings) -> tuple[list[str], list[list]]:
    """Columns and rows of the main figures, one row a point."""
    columns = ["point", "distance", "cosine", "probe", "shuffled", "p", "question patched", "system patched"]
    rows = []
    for layer in found.layers:
        rows.append(
            [
                str(layer.point),
                " / ".join(f"{layer.distance[place].value:.3f}" for place in PLACES),
                " / ".join(f"{layer.cosine[place].value:.3f}" for place in PLACES),
                " / ".join(f"{100 * layer.probe[place].value:.0f} %" for place in PLACES),
                "{:.0f}–{:.0f} %".format(*(100 * x for x in (layer.shuffled["answer"].low, layer.shuffled["answer"].high))),
                f"{layer.p_value['answer']:.2g}",
                *(_effect(layer.effect[patch]) for patch in PATCHES),
            ]
        )
    return columns, rows


def _effect(effect: stats.Figure | None) -> str:
    return "–" if effect is None else f"{effect.value:.2f} [{effect.low:.2f}, {effect.high:.2f}]"


def _depth(report: Report, found: Findings) -> None:
    at = [layer.point.boundary + 0.5 * layer.point.adapted for layer in found.layers]
    blocks = [x for x, layer in zip(at, found.layers) if layer.point.adapted]

    def plot(title: str, part: str, names: dict[str, str], ylabel: str, note: str, level: float | None = None) -> None:
        series = {name: (at, [getattr(layer, part)[key] for layer in found.layers]) for key, name in names.items()}
        report.plot(title, plots.bands(series, _DEPTH, ylabel, marks=blocks, level=level), note)

    dotted = " Dotted: the adapter's blocks." if blocks else ""
    if all(layer.effect["question"] is not None for layer in found.layers):
        plot(
            "Activation patching",
            "effect",
            _PATCH_NAMES,
            "share of the effect",
            "At each point, states of one conversation are replaced by the other's; 1: the reply becomes as unlikely as under the "
            "other rule. Where the question's curve rises, the rule is moved there; where the system text's falls, nothing behind "
            f"that point reads it any more. The line marks {HALF}." + dotted,
            HALF,
        )
    plot(
        "Patching, in nats",
        "nats",
        _PATCH_NAMES,
        "nats",
        "The fall of the reply's log-probability; own run minus patched run.",
    )
    series = {name: (at, [layer.probe[place] for layer in found.layers]) for place, name in _NAMES.items()}
    series["shuffled labels (answer)"] = at, [layer.shuffled["answer"] for layer in found.layers]
    report.plot(
        "Linear probes",
        plots.bands(series, _DEPTH, "held-out accuracy", marks=blocks, level=0.5),
        "Ridge regression on standardised states, folds that hold out whole facts, penalty chosen within each training part. "
        "Shuffled: labels swapped at random within pairs, the range of 95 % of the labellings." + dotted,
    )
    note = "Both conversations carry one reply that follows neither rule; only the system text differs." + dotted
    plot("Distance of the two conversations' states", "distance", _NAMES, "|a − b| / mean norm", note)
    plot("Cosine of the two conversations' states", "cosine", _NAMES, "cosine", note)


def _attention(report: Report, seen: Maps) -> None:
    names = [str(boundary) for boundary in seen.boundaries]
    heads = [str(head) for head in range(seen.mass.shape[1])]
    share = seen.share[:, 0].mean(-1)
    for role, label in enumerate(("the word to copy", "the rest of the rule's sentence")):
        if share[role] > 0:
            report.plot(
                f"Attention on {label}",
                plots.heat(seen.mass[:, :, role, 0].mean(-1), names, heads, "head", "boundary", top=1.0),
                f"Per cent of a head's attention at the positions that predict the reply, without filler; these are "
                f"{100 * share[role]:.0f} % of the system text's tokens.",
            )
    if len(seen.distances) > 1:
        rule = seen.mass[:, :, :2].sum(2).mean(1)
        lines = {f"block {b}": rule[i] for i, b in enumerate(names)} | {"even attention": seen.share[:2].sum(0)}
        report.plot("Attention on the rule's sentence against distance", _against(seen, lines, "attention on the rule"))
        added = {f"block {b}": seen.added[i] for i, b in enumerate(names)}
        report.plot(
            "What the blocks add, against distance",
            _against(seen, added, "|added| / |stream|"),
            "Attention onto the span sums to one at any distance; what can fade is where it lies and how much is added.",
        )
    for number, (reading, weights) in enumerate(seen.examples, 1):
        tokens = [text.strip() or "␣" for text, inside in zip(reading.strings, reading.system) if inside]
        for at, where in ((0, "the prompt's last position"), (None, "all positions that predict the reply")):
            values = weights[:, :, 0] if at == 0 else weights.mean(2)
            values = values.mean(1)
            report.plot(
                f"Conversation {number}: attention by token, {where}",
                plots.heat(values, names, tokens, "system text", "boundary", top=float(max(values.max(), 0.2))),
                "Mean over heads; darkest is the largest value." if at == 0 else "",
            )


def _against(seen: Maps, lines: dict[str, np.ndarray], ylabel: str):
    """Each line [distances, n] with its interval over conversations."""
    series = {
        name: (list(seen.distances), [stats.mean(values[d]) for d in range(len(seen.distances))])
        for name, values in lines.items()
    }
    return plots.figures_against(series, "tokens between system prompt and question", ylabel)
