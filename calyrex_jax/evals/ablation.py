"""Methods against each other: their runs pooled over seeds, learning curves, and the ablation's report.

found = pooled(verdicts, methods, reference="cal")     # figures by "cal", "cal@300", …, "frozen"; paired differences
write(found, methods, tasks, cells, …)                 # report.html
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import plots, stats, study, summary
from calyrex_jax.evals.report import Report, text_table
from calyrex_jax.evals.stats import Figure
from calyrex_jax.evals.tasks.api import Task

FROZEN = "frozen"
LEVEL = 0.9  # of adherence: how many steps a method takes to it

Cell = tuple[str, str]  # task and cell


@dataclass(frozen=True)
class Method:
    """One arm with all its runs.

    runs     {seed: the run's name}
    marks    the steps at which its runs were evaluated beside their end; a model there is named "cal@300"
    """

    name: str
    adapter: str
    placement: str
    boundaries: tuple[int, ...]
    parameters: int
    steps: int
    learning_rate: float
    runs: Mapping[int, str]
    marks: tuple[int, ...]
    loss: float
    wall_seconds: float

    def models(self) -> dict[int, str]:
        """{step: the model's name}, its end last."""
        return {step: f"{self.name}@{step}" for step in self.marks if step != self.steps} | {self.steps: self.name}

    def run_at(self, seed: int, step: int) -> str:
        """The name under which one run's state at a step was evaluated."""
        return self.runs[seed] if step == self.steps else f"{self.runs[seed]}@{step}"

    def as_dict(self) -> dict:
        """What report.json says of it, but for the figures."""
        return {
            "name": self.name,
            "adapter": self.adapter,
            "placement": self.placement,
            "boundaries": list(self.boundaries),
            "parameters": self.parameters,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            "seeds": list(self.runs),
            "loss": self.loss,
            "wall_seconds": self.wall_seconds,
        }


def pooled(
    verdicts: Mapping[str, Mapping[str, study.Verdicts]], methods: Sequence[Method], reference: str, seed: int
) -> study.Findings:
    """Seeds of a method pooled; differences at equal steps to the reference, and of that to the frozen model.

    A difference is taken over the seeds that both methods have. The reference leads: its figures are report.json's "tasks".
    """
    order = sorted(methods, key=lambda method: method.name != reference)
    main = [m for m in methods if m.name == reference]
    figures: dict[str, dict[str, dict[str, Figure]]] = {}
    differences: dict[str, dict[str, dict[str, Figure]]] = {}
    for task, found in verdicts.items():

        def runs(method: Method, step: int, seeds: Sequence[int], found=found) -> study.Verdicts:
            return study.pooled([found[method.run_at(s, step)] for s in seeds])

        def frozen(seeds: Sequence[int], found=found) -> study.Verdicts:
            # as often as there are seeds, so that differences pair like with like
            return study.pooled([found[FROZEN]] * len(seeds))

        judged = [
            (m, step, name) for m in order for step, name in m.models().items() if m.run_at(min(m.runs), step) in found
        ]
        judged.sort(key=lambda one: one[1] != one[0].steps)  # ends first
        figures[task] = {name: study.cells(runs(m, step, list(m.runs)).values(), seed) for m, step, name in judged}
        figures[task][FROZEN] = study.cells(found[FROZEN].values(), seed)
        pairs: dict[str, dict[str, Figure]] = {}
        for m, step, name in judged:
            other = main[0] if main and m.name != reference else None
            theirs = None if other is None else _step_of(other, step, m, found)
            if other is not None and theirs is not None and (shared := [s for s in m.runs if s in other.runs]):
                label = f"{name} - {other.models()[theirs]}"
                pairs[label] = study.compared(runs(other, theirs, shared), runs(m, step, shared), seed)
            elif other is None:
                pairs[f"{name} - {FROZEN}"] = study.compared(frozen(list(m.runs)), runs(m, step, list(m.runs)), seed)
        differences[task] = dict(sorted(pairs.items(), key=lambda pair: pair[0].endswith(f" - {FROZEN}")))
    return study.Findings(figures, differences, {task: {} for task in verdicts})


def _step_of(other: Method, step: int, method: Method, found: Mapping[str, study.Verdicts]) -> int | None:
    """The step of `other` that a method's state is compared with: an equal one that was judged; at its end else the end."""
    if step in other.models() and other.run_at(min(other.runs), step) in found:
        return step
    return other.steps if step == method.steps else None


def primary_cells(text: str, tasks: Sequence[Task]) -> list[Cell]:
    """config.ablate.primary, "TASK: CELL; …", as pairs; UserError for a task that is not evaluated.

    >>> primary_cells("rules: controls", [rules_task])
    [("rules", "controls")]
    """
    names, found = [task.name for task in tasks], []
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        task, _, cell = (part.strip() for part in entry.partition(":"))
        if task not in names or not cell:
            raise UserError(
                f"config.ablate.primary: {entry!r} is not understood; write TASK: CELL; TASK: CELL with tasks of "
                f"config.eval.tasks ({', '.join(names)})"
            )
        found.append((task, cell))
    return found


def headline_cells(task: Task, figures: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """The cells of the main table: the task's headline, and controls and answers where it has them."""
    return [cell for cell in (task.headline, "controls", "answers") if cell in all_cells(figures)]


def all_cells(figures: Mapping[str, Mapping[str, Figure]]) -> list[str]:
    """The cells of all models, but for the finer ones, whose names have a slash."""
    return list(dict.fromkeys(cell for cells in figures.values() for cell in cells if "/" not in cell))


def write(
    found: study.Findings, methods: Sequence[Method], tasks: Sequence[Task], primary: Sequence[Cell], about: str, path: Path
) -> str:
    """Writes report.html; returns the main table for the terminal. `primary` cells come first, by default the headlines."""
    report = Report("Ablation")
    report.text(about)
    figures = found.figures
    main = [(task.name, cell) for task in tasks for cell in headline_cells(task, figures[task.name])]
    columns = ["arm", "boundaries", "parameters", "steps", "rate", "loss", *(cell for _, cell in main)]
    lines = [
        [m.name, shown(m.boundaries), f"{m.parameters:,}", m.steps, f"{m.learning_rate:g}", f"{m.loss:.3f}"]
        + [figures[task][m.name].get(cell) for task, cell in main]
        for m in methods
    ]
    lines.append([FROZEN, "", "0", None, "", "", *(figures[task][FROZEN].get(cell) for task, cell in main)])
    report.table("Arms", columns, lines)
    ends = [m.name for m in methods]
    if primary:
        _primary(report, found, [*ends, FROZEN], primary)
    _curves(report, figures, methods, [c for c in primary or main if c[0] in figures], tasks)
    for task in tasks:
        mine = figures[task.name]
        _bars(report, task, mine, [*ends, FROZEN])
        shown_models = {name: mine[name] for name in (*ends, FROZEN)}
        report.text(task.about, title=task.name)
        report.table(f"{task.name}: all cells", ["cell", *shown_models], summary.rows(all_cells(mine), shown_models))
        differences = {pair: cells for pair, cells in found.differences[task.name].items() if _is_of_end(pair)}
        report.table(f"{task.name}: differences", ["cell", *differences], summary.rows(all_cells(mine), differences))
    sizes = [Figure(1, m.parameters / 1e6, m.parameters / 1e6, m.parameters / 1e6) for m in methods]
    report.plot("Trainable parameters", plots.bars(ends, {"parameters": sizes}, "millions"))
    report.write_html(path)
    return text_table(columns, lines)


def _primary(report: Report, found: study.Findings, models: Sequence[str], primary: Sequence[Cell]) -> None:
    """The cells that were fixed beforehand, in their order: figures and differences of the ends."""
    for task, cell in primary:
        if not any(cell in cells for cells in found.figures[task].values()):
            known = ", ".join(dict.fromkeys(name for cells in found.figures[task].values() for name in cells))
            print(f"config.ablate.primary: {task} has no cell {cell!r}; it has {known}", file=sys.stderr, flush=True)
    rows = [[f"{task}: {cell}", *(found.figures[task][m].get(cell) for m in models)] for task, cell in primary]
    report.table("Primary cells", ["cell", *models], rows, "fixed before the runs")
    pairs = [pair for pair in next(iter(found.differences.values())) if _is_of_end(pair)]
    rows = [[f"{task}: {cell}", *(found.differences[task].get(p, {}).get(cell) for p in pairs)] for task, cell in primary]
    report.table("Primary cells: differences", ["cell", *pairs], rows, "paired, over the same items and seeds")


def _is_of_end(pair: str) -> bool:
    """Whether a difference is that of a method's end, and not of a state on its way."""
    return "@" not in pair.partition(" - ")[0]


def _bars(report: Report, task: Task, figures: Mapping[str, Mapping[str, Figure]], models: Sequence[str]) -> None:
    groups: dict[bool, list[str]] = {}
    for cell in headline_cells(task, figures):
        groups.setdefault(figures[models[0]][cell].percent, []).append(cell)
    for percent, cells in groups.items():
        series = {cell: [figures[name].get(cell) for name in models] for cell in cells}
        title = f"{task.name}: {', '.join(cells)}"
        report.plot(title, plots.bars(models, series, "" if percent else title))


def _curves(report: Report, figures, methods: Sequence[Method], cells: Sequence[Cell], tasks: Sequence[Task]) -> None:
    """Each cell against steps, and how soon each method reaches LEVEL in it."""
    cells = [
        (task, cell) for task, cell in cells if any(m.models()[s] in figures[task] for m in methods for s in m.marks[:-1])
    ]
    if not cells:
        return
    falling = {task.name for task in tasks if getattr(task, "lower_is_better", False)}
    rows = []
    for task, cell in cells:
        points = {
            m.name: [(step, figures[task][n][cell]) for step, n in m.models().items() if cell in figures[task].get(n, {})]
            for m in methods
        }
        points = {name: line for name, line in points.items() if line}
        if not points:
            continue
        series = {name: ([step for step, _ in line], [f for _, f in line]) for name, line in points.items()}
        report.plot(f"{task}: {cell}, by step", plots.figures_against(series, "steps", cell))
        if task not in falling and all(f.percent for line in points.values() for _, f in line):
            rows.append([f"{task}: {cell}", *(_reached(points.get(m.name)) for m in methods)])
    if rows:
        note = f"steps until {LEVEL:.0%} of items, by straight lines between the evaluated steps"
        report.table(f"Steps to {LEVEL:.0%}", ["cell", *(m.name for m in methods)], rows, note)


def _reached(line: Sequence[tuple[int, Figure]] | None) -> str:
    """When a curve reaches LEVEL, as tables say it: "412", "≤ 150" where it begins there, "> 2400"."""
    if not line:
        return "–"
    steps, values = [step for step, _ in line], [figure.value for _, figure in line]
    at = stats.first_reached(steps, values, LEVEL)
    if at is None:
        return f"> {steps[-1]}"
    return f"≤ {steps[0]}" if at == steps[0] else f"{at:.0f}"


def shown(boundaries: Sequence[int]) -> str:
    """26–30, or a list where they are not consecutive."""
    if not boundaries:
        return "–"
    low, high = boundaries[0], boundaries[-1]
    if len(boundaries) > 1 and list(boundaries) == list(range(low, high + 1)):
        return f"{low}–{high}"
    return ", ".join(map(str, boundaries))
