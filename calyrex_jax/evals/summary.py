"""Findings as report.json, report.html and a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from calyrex_jax.evals import plots, stats
from calyrex_jax.evals.report import Report, text_table
from calyrex_jax.evals.stats import Figure
from calyrex_jax.evals.study import Findings, Verdicts
from calyrex_jax.evals.tasks.api import Task

_BARS = 16  # cells in one plot
_FEWEST = 5  # replies behind one point of a trajectory


def as_json(found: Findings, tasks: Sequence[Task]) -> dict:
    """report.json's part of an evaluation.

    tasks    {TASK: its headline figure for the model under test (the first), and "cells": all of its figures}
    models   the same for every model: {MODEL: {TASK: …}}
    compare  {"b - a": {TASK: …}}: paired differences on the same items; for a perplexity the ratio b / a
    """
    names = _models(found)
    given = found.figures  # not every model need be in every task
    models = {
        name: {task.name: _one(task, given[task.name][name]) for task in tasks if name in given[task.name]} for name in names
    }
    pairs = dict.fromkeys(pair for differences in found.differences.values() for pair in differences)
    compare = {pair: {task.name: _one(task, found.differences[task.name].get(pair, {})) for task in tasks} for pair in pairs}
    return {"tasks": models[names[0]], "model": names[0], "models": models, "compare": compare}


def _one(task: Task, cells: dict[str, Figure]) -> dict:
    headline = cells.get(task.headline)
    return ({} if headline is None else headline.as_dict()) | {"cells": {name: f.as_dict() for name, f in cells.items()}}


def as_report(found: Findings, tasks: Sequence[Task], directory: Path) -> str:
    """Writes DIR/report.html; returns the main cells as a table for the terminal."""
    names = _models(found)
    report = Report("Evaluation: " + ", ".join(task.name for task in tasks))
    report.text(
        f"Models: {', '.join(names)}. Greedy replies, the same items for every model. Intervals are 95 %: Wilson for rates "
        "over single tries, else the percentile bootstrap over items; differences are paired, over the same items. Every "
        "reply and verdict stands in eval/TASK.MODEL.jsonl."
    )
    shown = []
    for task in tasks:
        figures, differences = found.figures[task.name], found.differences[task.name]
        cells = list(dict.fromkeys(cell for model in figures.values() for cell in model))
        main, rest = _parted(cells)
        report.text(task.about, title=task.name)
        report.table(f"{task.name}: figures", ["cell", *names], rows(main, figures))
        if len(names) > 1:
            report.table(f"{task.name}: differences", ["cell", *differences], rows(main, differences))
        drawn = [*names[-1:], *names[:-1]]  # the reference first: plots give it the quiet colour
        for curve in task.curves(cells):
            series = {n: ([x for x, _ in curve.points], [figures[n].get(c) for _, c in curve.points]) for n in drawn}
            report.plot(f"{task.name}: {curve.title}", plots.figures_against(series, curve.xlabel, curve.title))
        rates = [cell for cell in main if all(cell in m and m[cell].percent for m in figures.values())]
        if rates and not task.curves(cells):
            report.plot(
                f"{task.name}: plot", plots.bars(rates[:_BARS], {n: [figures[n][c] for c in rates[:_BARS]] for n in drawn})
            )
        if harm := trajectories(found.verdicts[task.name]):
            series = {n: ([x for x, _ in harm[n]], [f for _, f in harm[n]]) for n in drawn if n in harm}
            what = "harm probability, as SVGT reads it while replies are written"
            report.plot(
                f"{task.name}: {what}",
                plots.figures_against(series, "refreshes since the prompt", "harm probability"),
                "Means over the replies that are still being written at that refresh: short replies leave the later points.",
            )
        if rest:
            report.table(f"{task.name}: finer cells", ["cell", *names], rows(rest, figures))
        shown += [[f"{task.name}: {row[0]}", *row[1:]] for row in rows(main, figures)]
    report.write_html(directory / "report.html")
    return text_table(["cell", *names], shown)


def trajectories(verdicts: Mapping[str, Verdicts]) -> dict[str, list[tuple[float, Figure]]]:
    """{model: (refresh, mean harm probability over the replies that came so far)}, where verdicts tell it."""
    found = {}
    for name, by_item in verdicts.items():
        lines = [verdict.said["harm"] for verdict in by_item.values() if verdict.said.get("harm")]
        longest = max(map(len, lines), default=0)
        values = [np.array([line[turn] for line in lines if len(line) > turn]) for turn in range(longest)]
        points = [(float(turn), stats.mean(v)) for turn, v in enumerate(values) if len(v) >= _FEWEST]
        if points:
            found[name] = points
    return found


def _models(found: Findings) -> list[str]:
    return list(dict.fromkeys(name for models in found.figures.values() for name in models))


def _parted(cells: Iterable[str]) -> tuple[list[str], list[str]]:
    """The main cells, and the finer ones, whose names have a slash."""
    cells = list(cells)
    return [c for c in cells if "/" not in c], sorted(c for c in cells if "/" in c)


def rows(cells: Sequence[str], figures: dict[str, dict[str, Figure]]) -> list[list]:
    """Table rows, one a cell: its figures in every model's (or difference's) column, None where there is none."""
    return [[cell, *(by_cell.get(cell) for by_cell in figures.values())] for cell in cells]
