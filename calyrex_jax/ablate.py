"""`--mode=ablate`: where must the adapter sit? Trains every placement with every seed, evaluates all of them, and compares.

WORKDIR/PLACEMENT_sSEED/ is an ordinary training run, resumed or skipped by itself; frozen states are shared in WORKDIR/prefix.
WORKDIR/report.json has "ablation": a row a placement, in report.html with plots.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from ml_collections import ConfigDict

from calyrex_jax import evaluate, makers
from calyrex_jax.adapters import cal, placement
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import plots, study, summary
from calyrex_jax.evals.report import Report, text_table, write_json
from calyrex_jax.evals.stats import Figure
from calyrex_jax.evals.tasks import registry
from calyrex_jax.evals.tasks.api import Task
from calyrex_jax.metrics import Metrics
from calyrex_jax.model import Model
from calyrex_jax.train import Interrupted, StopSignal, train
from calyrex_jax.weights.sources import resolve


@dataclass(frozen=True)
class Arm:
    """One placement with one seed: its config, where it trains, and what it will have."""

    placement: str
    seed: int
    config: ConfigDict
    directory: Path
    boundaries: tuple[int, ...]
    parameters: int

    @property
    def name(self) -> str:
        return self.directory.name


def ablate(config: ConfigDict, workdir: str) -> int:
    """Runs or resumes the whole ablation; returns the exit status."""
    check(config)
    tasks = registry.make_tasks(config.eval.tasks, evaluate.task_settings(config))
    directory = prepare_workdir(workdir)
    spec = DecoderSpec.from_config(resolve(config.backbone.source).config, config.backbone.source)
    arms = plan(config, spec, directory)
    for number, arm in enumerate(arms, 1):
        what = f"{number} of {len(arms)}: {arm.name}, boundaries {shown(arm.boundaries)}, {arm.parameters:,} parameters"
        if is_finished(arm):
            print(f"{what}: finished earlier", file=sys.stderr, flush=True)
            continue
        print(what, file=sys.stderr, flush=True)
        if status := train(arm.config, str(arm.directory)):
            return status
        jax.clear_caches()  # no other arm runs these programs
    stop, show = StopSignal(), Metrics(directory)
    try:
        found = evaluate.measured(config, tasks, directory, {arm.name: arm.directory for arm in arms}, show, stop)
    except Interrupted as signalled:
        print("interrupted: finished runs and verdicts are kept; the same command goes on from there", file=sys.stderr)
        return signalled.args[0]
    finally:
        show.close()
    merged = by_placement(found, arms, config.ablate.reference, config.eval.seed)
    rows = [row(arms, name, merged) for name in names(arms)]
    content = {"ablation": rows} | summary.as_json(merged, tasks)
    write_json(directory / "report.json", evaluate.kept_report(directory / "report.json") | content)
    print(write_report(config, rows, merged, tasks, directory), flush=True)
    show.say(f"done: {len(arms)} runs; {directory / 'report.json'}, {directory / 'report.html'}")
    return 0


def plan(config: ConfigDict, spec: DecoderSpec, directory: Path) -> list[Arm]:
    """All runs, lower first boundaries first: frozen states of one are the start of the next ones'.

    Raises UserError for what no run could do: an unknown placement, a name given twice, a budget too small for it.
    """
    wanted = [name.strip() for name in config.ablate.placements.split(";") if name.strip()] or list(placement.PRESETS)
    folders = [name.replace(" ", "").replace(",", "-") for name in wanted]
    if len(set(folders)) < len(folders):
        raise UserError(f"config.ablate.placements: {config.ablate.placements!r} names a placement twice; name each once")
    if not all(adapter.boundaries for adapter in makers.adapters(config, spec)) or config.adapter.name == "prompt_only":
        raise UserError(
            f"config.adapter.name={config.adapter.name}: an ablation moves blocks from boundary to boundary; "
            "name adapters with blocks, such as cal or parallel_mlp"
        )
    budget = makers.cal_budget(at(config, config.ablate.reference), spec)
    arms = []
    for name, folder in zip(wanted, folders, strict=True):
        boundaries = placement.boundaries(name, spec.num_layers)
        for seed in range(config.train.seed, config.train.seed + config.ablate.seeds):
            arm = at(config, name)
            arm.train.seed = seed
            arm.data.token_dir = config.data.token_dir or str(directory / "tokens")
            if config.ablate.match == "parameters":
                size(arm, spec, len(boundaries), budget)
            if config.data.prefix_cache != "off":
                arm.data.prefix_dir = config.data.prefix_dir or str(directory / "prefix")
                # so few layers are run sooner than their states are read
                arm.data.prefix_cache = config.data.prefix_cache if boundaries[0] > spec.num_layers // 8 else "off"
            count = trees.count(jax.eval_shape(Model(spec, makers.adapters(arm, spec)).init_adapters, jax.random.key(0)))
            arms.append(Arm(name, seed, arm, directory / f"{folder}_s{seed}", boundaries, count))
    return sorted(arms, key=lambda arm: (arm.boundaries[0], len(arm.boundaries), arm.seed))


def at(config: ConfigDict, name: str) -> ConfigDict:
    """A copy of the config that trains at one placement and leaves the evaluation to the ablation."""
    found = copy.deepcopy(config)
    found.adapter.placement = name
    found.eval.after_training = ""
    return found


def size(config: ConfigDict, spec: DecoderSpec, blocks: int, budget: int) -> None:
    """Gives the blocks of a config the size with which all of them have `budget` parameters."""
    made = cal.sized(makers.make_cal(config, spec).config, blocks, budget)
    config.cal.num_heads, config.cal.num_kv_heads, config.cal.mlp_dim = made.num_heads, made.num_kv_heads, made.mlp_dim


def is_finished(arm: Arm) -> bool:
    """Whether an earlier command trained this very run to its end."""
    try:
        report = json.loads((arm.directory / "report.json").read_text(encoding="utf-8"))
        config = json.loads((arm.directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = {group: fields for group, fields in as_dict(arm.config).items() if group not in ("eval", "ablate", "generate")}
    return report.get("steps") == arm.config.train.steps and same.items() <= config.items()


def names(arms: Sequence[Arm]) -> list[str]:
    """The placements, in the arms' order."""
    return list(dict.fromkeys(arm.placement for arm in arms))


def by_placement(found: study.Findings, arms: Sequence[Arm], reference: str, seed: int) -> study.Findings:
    """Seeds of a placement pooled; differences to the reference placement, and of that to the frozen model."""
    merged = {}
    for task, models in found.verdicts.items():
        # the reference leads: its figures are report.json's "tasks"
        order = sorted(names(arms), key=lambda name: name != reference)
        merged[task] = {n: study.pooled([models[arm.name] for arm in arms if arm.placement == n]) for n in order}
        # as often as there are seeds, so that differences pair like with like
        merged[task][evaluate.FROZEN] = study.pooled([models[evaluate.FROZEN]] * len({arm.seed for arm in arms}))
    others = [name for name in names(arms) if name != reference]
    if len(others) == len(names(arms)):
        pairs = [(name, evaluate.FROZEN) for name in others]
    else:
        pairs = [(name, reference) for name in others] + [(reference, evaluate.FROZEN)]
    return study.findings(merged, pairs, seed)


def row(arms: Sequence[Arm], name: str, merged: study.Findings) -> dict:
    """What report.json says of one placement; loss and seconds are means over its seeds, "cells" are figures."""
    own = [arm for arm in arms if arm.placement == name]
    reports = [json.loads((arm.directory / "report.json").read_text(encoding="utf-8")) for arm in own]
    return {
        "placement": name,
        "boundaries": list(own[0].boundaries),
        "parameters": own[0].parameters,
        "seeds": [arm.seed for arm in own],
        "loss": sum(r["metrics"]["loss"] for r in reports) / len(own),
        "wall_seconds": sum(r["wall_seconds"] for r in reports) / len(own),
        "cells": {task: {cell: f.as_dict() for cell, f in models[name].items()} for task, models in merged.figures.items()},
    }


def shown(boundaries: Sequence[int]) -> str:
    """26–30, or a list where they are not consecutive."""
    low, high = boundaries[0], boundaries[-1]
    if len(boundaries) > 1 and list(boundaries) == list(range(low, high + 1)):
        return f"{low}–{high}"
    return ", ".join(map(str, boundaries))


def write_report(
    config: ConfigDict, rows: list[dict], merged: study.Findings, tasks: Sequence[Task], directory: Path
) -> str:
    """Writes report.html; returns the main table for the terminal."""
    report = Report("Placement of the adapter")
    alike = {"width": "all blocks alike", "parameters": "all placements of one size"}[config.ablate.match]
    report.text(
        f"{config.adapter.name} on {config.backbone.source}: {config.train.steps} steps a run, {config.ablate.seeds} seeds a "
        f"placement, {alike}. A boundary b lies after b decoder layers. Intervals are 95 %, over items; with several seeds an "
        "item counts with all of its runs together."
    )
    order = [r["placement"] for r in rows]
    main = {task.name: headline_cells(task, merged.figures[task.name]) for task in tasks}
    columns = ["placement", "boundaries", "parameters", "loss", *(cell for cells in main.values() for cell in cells)]
    lines = [
        [r["placement"], shown(r["boundaries"]), f"{r['parameters']:,}", f"{r['loss']:.3f}"]
        + [merged.figures[task][r["placement"]].get(cell) for task, cells in main.items() for cell in cells]
        for r in rows
    ]
    frozen = [merged.figures[task][evaluate.FROZEN].get(cell) for task, cells in main.items() for cell in cells]
    lines.append([evaluate.FROZEN, "", "0", "", *frozen])
    report.table("Placements", columns, lines)
    for task in tasks:
        figures = merged.figures[task.name]
        groups: dict[bool, list[str]] = {}
        for cell in main[task.name]:
            groups.setdefault(figures[order[0]][cell].percent, []).append(cell)
        for percent, cells in groups.items():
            series = {cell: [figures[name].get(cell) for name in (*order, evaluate.FROZEN)] for cell in cells}
            title = f"{task.name}: {', '.join(cells)}"
            report.plot(title, plots.bars([*order, evaluate.FROZEN], series, "" if percent else title))
        report.table(f"{task.name}: all cells", ["cell", *figures], summary.rows(all_cells(figures), figures))
        differences = merged.differences[task.name]
        report.table(f"{task.name}: differences", ["cell", *differences], summary.rows(all_cells(figures), differences))
    sizes = [Figure(1, r["parameters"] / 1e6, r["parameters"] / 1e6, r["parameters"] / 1e6) for r in rows]
    report.plot("Trainable parameters", plots.bars(order, {"parameters": sizes}, "millions"))
    report.write_html(directory / "report.html")
    return text_table(columns, lines)


def headline_cells(task: Task, figures: dict[str, dict[str, Figure]]) -> list[str]:
    """The cells of the main table: the task's headline, and controls and answers where it has them."""
    return [cell for cell in (task.headline, "controls", "answers") if cell in all_cells(figures)]


def all_cells(figures: dict[str, dict[str, Figure]]) -> list[str]:
    """The cells of all models, but for the finer ones, whose names have a slash."""
    return list(dict.fromkeys(cell for cells in figures.values() for cell in cells if "/" not in cell))
