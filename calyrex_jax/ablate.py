"""`--mode=ablate`: which adapter, and where? Trains every arm with every seed, evaluates all of them, and compares.

Arms are the eight placements, or whatever config.ablate.arms lists (arms.py). WORKDIR/ARM_sSEED/ is an ordinary training run,
resumed or skipped by itself; frozen states are shared in WORKDIR/prefix. With config.ablate.rates every arm first tries them
for a few steps in WORKDIR/sweep and keeps the best. WORKDIR/report.json has "ablation": a row an arm, in report.html with plots.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from calyrex_jax import evaluate
from calyrex_jax.arms import Arm, is_finished, plan, trials
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import check, prepare_workdir
from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import ablation, study, summary
from calyrex_jax.evals.report import write_json
from calyrex_jax.evals.tasks import registry
from calyrex_jax.evals.tasks.api import Task
from calyrex_jax.metrics import Metrics
from calyrex_jax.train import Interrupted, StopSignal, train
from calyrex_jax.weights.sources import resolve


def ablate(config: ConfigDict, workdir: str) -> int:
    """Runs or resumes the whole ablation; returns the exit status."""
    check(config)
    tasks = registry.make_tasks(config.eval.tasks, evaluate.task_settings(config))
    curve_tasks(config, tasks)
    primary = ablation.primary_cells(config.ablate.primary, tasks)
    directory = prepare_workdir(workdir)
    spec = DecoderSpec.from_config(resolve(config.backbone.source).config, config.backbone.source)
    arms = plan(config, spec, directory)
    try:
        rates = sweep(config, arms, directory)
        for number, arm in enumerate(arms, 1):
            what = f"{number} of {len(arms)}: {arm.name}, boundaries {ablation.shown(arm.boundaries)}"
            run(arm, f"{what}, {arm.parameters:,} parameters")
        show = Metrics(directory)
        try:
            found = evaluated(config, tasks, arms, directory, show)
        finally:
            show.close()
    except Interrupted as signalled:
        print("interrupted: finished runs and verdicts are kept; the same command goes on from there", file=sys.stderr)
        return signalled.args[0]
    made = methods(arms)
    merged = ablation.pooled(found, made, config.ablate.reference, config.eval.seed)
    rows = [m.as_dict() | {"cells": cells_of(m.name, merged)} for m in made]
    content = {"ablation": rows, "rates": rates} | summary.as_json(merged, tasks)
    write_json(directory / "report.json", evaluate.kept_report(directory / "report.json") | content)
    print(ablation.write(merged, made, tasks, primary, about(config, rates), directory / "report.html"), flush=True)
    print(f"done: {len(arms)} runs; {directory / 'report.json'}, {directory / 'report.html'}", file=sys.stderr, flush=True)
    return 0


def run(arm: Arm, what: str) -> None:
    """Trains one arm unless an earlier command did; raises Interrupted where a signal ends it."""
    if is_finished(arm):
        print(f"{what}: finished earlier", file=sys.stderr, flush=True)
        return
    print(what, file=sys.stderr, flush=True)
    if status := train(arm.config, str(arm.directory)):
        raise Interrupted(status)
    jax.clear_caches()  # no other arm runs these programs


def sweep(config: ConfigDict, arms: Sequence[Arm], directory: Path) -> dict[str, dict]:
    """Tries every arm's learning rates and gives its runs the one with the lowest validation perplexity.

    Returns {arm: {"chosen": rate, "perplexity": {rate: figure}, "edge": whether the best is the least or greatest tried}}.
    """
    tried = {arm.method: trials(arm, directory / "sweep") for arm in reversed(arms)}  # the first seed of each
    tried = {name: tried[name] for name in dict.fromkeys(arm.method for arm in arms) if tried[name]}
    todo = [trial for by_rate in tried.values() for trial in by_rate.values()]
    if not todo:
        return {}
    for number, trial in enumerate(todo, 1):
        run(trial, f"sweep, {number} of {len(todo)}: {trial.name}")
    tasks = registry.make_tasks("validation", evaluate.task_settings(config))
    places = {trial.name: evaluate.Place(trial.directory, trial.config.train.steps) for trial in todo}
    show = Metrics(directory / "sweep")
    try:
        found = evaluate.measured(config, tasks, directory / "sweep", places, show, StopSignal())["validation"]
    finally:
        show.close()
    rates = {}
    for name, by_rate in tried.items():
        figures = {rate: study.cells(found[trial.name].values())[tasks[0].headline] for rate, trial in by_rate.items()}
        best = min(figures, key=lambda rate: figures[rate].value)
        edge = len(figures) > 1 and best in (min(figures), max(figures))
        rates[name] = {"chosen": best, "perplexity": {f"{rate:g}": f.as_dict() for rate, f in figures.items()}, "edge": edge}
        show.say(f"{name}: learning rate {best:g} of {', '.join(f'{rate:g}' for rate in figures)}")
        for arm in (arm for arm in arms if arm.method == name):
            arm.config.train.learning_rate = best
            if arm.seed == by_rate[best].seed:
                go_on_from(by_rate[best], arm)
    return rates


def go_on_from(trial: Arm, arm: Arm) -> None:
    """A constant rate makes a trial the beginning of the run with its rate and seed, which then need not be trained again."""
    if (
        arm.directory.exists()
        or arm.config.train.schedule != "constant"
        or trial.config.train.steps > arm.config.train.steps
    ):
        return
    half = arm.directory.with_name(f".{arm.name}.part")
    shutil.rmtree(half, ignore_errors=True)
    shutil.copytree(trial.directory, half)
    os.replace(half, arm.directory)


def curve_tasks(config: ConfigDict, tasks: Sequence[Task]) -> list[Task]:
    """The tasks by which checkpoints along a run are judged; UserError for one that is not evaluated at all."""
    wanted = [name.strip() for name in config.ablate.curve_tasks.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in [task.name for task in tasks]]:
        raise UserError(f"config.ablate.curve_tasks: {unknown[0]!r} is not in config.eval.tasks={config.eval.tasks!r}")
    return [task for task in tasks if not wanted or task.name in wanted]


def evaluated(
    config: ConfigDict, tasks: Sequence[Task], arms: Sequence[Arm], directory: Path, show: Metrics
) -> dict[str, dict[str, study.Verdicts]]:
    """Verdicts by task and model: of all runs' ends, and in the curve's tasks also of their checkpoints on the way."""
    ends, along = {}, {}
    for arm in arms:
        last = arm.config.train.steps if arm.marks else None
        ends[arm.name] = evaluate.Place(arm.directory, last)
        along |= {f"{arm.name}@{step}": evaluate.Place(arm.directory, step) for step in arm.marks if step != last}
    stop, found = StopSignal(), {}
    drawn = curve_tasks(config, tasks) if along else []
    for part, places in ((drawn, ends | along), ([task for task in tasks if task not in drawn], ends)):
        if part:
            found |= evaluate.measured(config, part, directory, places, show, stop)
    return {task.name: found[task.name] for task in tasks}


def methods(arms: Sequence[Arm]) -> list[ablation.Method]:
    """The arms' runs by method, in their order; loss and seconds are means over seeds."""
    found = []
    for name in dict.fromkeys(arm.method for arm in arms):
        own = [arm for arm in arms if arm.method == name]
        reports = [json.loads((arm.directory / "report.json").read_text(encoding="utf-8")) for arm in own]
        losses = [loss_at(arm.directory / "metrics.jsonl", arm.config.train.steps) for arm in own]
        first, train = own[0], own[0].config.train
        found.append(
            ablation.Method(
                name,
                first.config.adapter.name,
                first.config.adapter.placement,
                first.boundaries,
                first.parameters,
                train.steps,
                float(train.learning_rate),
                {arm.seed: arm.name for arm in own},
                first.marks,
                sum(losses) / len(own),
                sum(r["wall_seconds"] for r in reports) / len(own),
            )
        )
    return found


def loss_at(path: Path, step: int) -> float:
    """The loss that a run logged at a step; the run may have gone on since."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return next(line["loss"] for line in lines if line["step"] == step)


def cells_of(name: str, found: study.Findings) -> dict:
    """A method's figures as report.json has them: {task: {cell: figure}}."""
    return {task: {cell: f.as_dict() for cell, f in models[name].items()} for task, models in found.figures.items()}


def about(config: ConfigDict, rates: dict[str, dict]) -> str:
    """What the report says first."""
    alike = {"width": "blocks as each arm has them", "parameters": f"all of {config.ablate.reference}'s size"}
    text = (
        f"{config.backbone.source}: {alike[config.ablate.match]}; schedule {config.train.schedule}. A boundary b lies after b "
        "decoder layers. Intervals are 95 %, over items; with several seeds an item counts with all of its runs together, and "
        "a difference is taken over the seeds that both arms have."
    )
    for name, tried in rates.items():
        found = ", ".join(f"{rate}: {figure['value']:.3f}" for rate, figure in tried["perplexity"].items())
        text += f"\n\nLearning rate of {name}: {tried['chosen']:g}, by validation perplexity after "
        text += f"{config.ablate.rate_steps} steps ({found})"
        text += "; the best lies at the edge of what was tried." if tried["edge"] else "."
    return text
