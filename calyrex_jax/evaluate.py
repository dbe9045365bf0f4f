"""`--mode=eval`: tasks by models, with intervals and paired differences, in report.json and report.html.

The models are the run's own adapters (newest checkpoint of --workdir), those of config.eval.compare="NAME=DIR,…", and always
the frozen backbone. Everything that a user can get wrong is refused before weights are loaded.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
from ml_collections import ConfigDict

from calyrex_jax import build, checkpoint, makers
from calyrex_jax.adapters.value_bridge import InjectionConfig
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree
from calyrex_jax.evals import study, summary
from calyrex_jax.evals.ask import ChatReader, ModelAsk
from calyrex_jax.evals.discriminator import Discriminator
from calyrex_jax.evals.report import write_json
from calyrex_jax.evals.scorers import ValueScorer
from calyrex_jax.evals.tasks import registry
from calyrex_jax.evals.tasks.api import Task
from calyrex_jax.evals.tasks.lm_eval_tasks import Prompting
from calyrex_jax.generate.batching import max_positions
from calyrex_jax.metrics import Metrics
from calyrex_jax.train import Interrupted, StopSignal

FROZEN = "frozen"


@dataclass(frozen=True)
class Place:
    """Where a trained adapter lies: a run's directory, and the step of its checkpoint, None for the newest."""

    directory: Path
    step: int | None = None


def evaluate(config: ConfigDict, workdir: str) -> int:
    """Runs config.eval.tasks for all models; returns the exit status."""
    check(config)
    tasks = registry.make_tasks(config.eval.tasks, task_settings(config))
    directory = prepare_workdir(workdir)
    stop, show = StopSignal(), Metrics(directory)
    try:
        verdicts = measured(config, tasks, directory, parse_compare(config.eval.compare), show, stop)
    except Interrupted as signalled:
        print("interrupted: every verdict so far is kept; the same command goes on from there", file=sys.stderr, flush=True)
        return signalled.args[0]
    finally:
        show.close()
    found = study.every_pair(verdicts, config.eval.seed)
    write_json(directory / "report.json", kept_report(directory / "report.json") | summary.as_json(found, tasks))
    print(summary.as_report(found, tasks, directory), flush=True)
    names = ", ".join(task.name for task in tasks)
    show.say(f"done: {names}; {directory / 'report.json'}, {directory / 'report.html'}, verdicts in eval/")
    return 0


def measured(
    config: ConfigDict, tasks: Sequence[Task], directory: Path, places: dict[str, Place], show: Metrics, stop: StopSignal
) -> dict[str, dict[str, study.Verdicts]]:
    """Verdicts of the tasks, {task: {model: …}}, for the run's own adapters, those of `places` by name, and the frozen backbone."""
    run = build.open_run(config)
    others = compared_runs(run, places)
    judges = {s.path: saved_run(run, s.path, f"config.eval.scorer: svgt:{s.path}") for s in value_scorers(tasks)}
    reader = ChatReader(run.tokenizer, run.policy, max_positions(run.spec))
    items = {task.name: task.items(reader) for task in tasks}
    backbone = build.load_weights(run)
    subjects = make_subjects(run, directory, others, reader, backbone)
    tasks = with_judges(tasks, judges, reader, backbone)
    write_json(directory / "config.json", as_dict(config))
    return study.collect(tasks, items, subjects, directory / "eval", show, stop.check)


def task_settings(config: ConfigDict) -> registry.Settings:
    """config.eval as the tasks take it."""
    e = config.eval
    return registry.Settings(
        limit=e.limit,
        far_limit=e.far_limit,
        limits=registry.parse_limits(e.limits, e.tasks),
        seed=e.seed,
        new_tokens=e.max_new_tokens,
        long_new_tokens=e.long_max_new_tokens,
        context_lengths=e.context_lengths,
        filler=e.filler,
        turns=e.turns,
        shots=e.shots,
        prompting=Prompting(e.lm_chat, e.lm_system),
        data=registry.parse_data(e.data, e.tasks),
        scorer=e.scorer,
    )


def kept_report(path: Path) -> dict:
    """What training wrote into the report.json of the same directory: it stays beside the evaluation's figures."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def parse_compare(compare: str) -> dict[str, Place]:
    """config.eval.compare, "NAME=DIR,…", as {name: place}; UserError where it is not understood."""
    found: dict[str, Place] = {}
    for entry in filter(None, (part.strip() for part in compare.split(","))):
        name, _, place = entry.partition("=")
        if not name or not place or name in found or name == FROZEN or not name.replace("_", "").replace("-", "").isalnum():
            raise UserError(
                f"config.eval.compare: {entry!r} is not understood; write NAME=DIR,NAME=DIR with different names, none of them {FROZEN}"
            )
        found[name] = Place(Path(place).expanduser().resolve())
    return found


def compared_runs(run: build.Run, places: dict[str, Place]) -> dict[str, tuple[build.Run, Place]]:
    """{name: (the run with that directory's adapters, their place)}.

    The adapter's name, placement and settings are those that the directory's newest checkpoint was trained with; the
    backbone must be this run's. Raises UserError where there is no checkpoint or it belongs to another backbone.
    """
    return {
        name: (saved_run(run, place.directory, f"config.eval.compare: {name}={place.directory}", place.step), place)
        for name, place in places.items()
    }


def saved_run(run: build.Run, place: str | Path, where: str, step: int | None = None) -> build.Run:
    """`run` with the adapters of another directory's newest checkpoint, or of `step`, as `compared_runs` has them."""
    directory = Path(place).expanduser().resolve()
    stage = build.latest_stage(directory)
    saved = checkpoint.Checkpoints(stage or directory / "checkpoints", keep=None, config=as_dict(run.config))
    if saved.latest_step() is None:
        raise UserError(f"{where}: no finished checkpoint in {directory / 'checkpoints'}; train there or name another run")
    if step is not None and step not in saved.steps():
        raise UserError(
            f"{where}: its checkpoint of step {step} is gone (it has {', '.join(map(str, saved.steps()))}); "
            f"delete {directory} to train it again"
        )
    theirs = saved.saved_config(step)
    if changed := checkpoint.config_differences(theirs, as_dict(run.config), checkpoint.BACKBONE_FIELDS):
        raise UserError(f"{where} was trained for another backbone: {'; '.join(changed)}; name a run of this backbone")
    return with_adapters_of(run, theirs, where)


def value_scorers(tasks: Sequence[Task]) -> list[ValueScorer]:
    """The scorers among the tasks' that are trained value spaces."""
    return [scorer for task in tasks if isinstance(scorer := getattr(task, "scorer", None), ValueScorer)]


def with_judges(tasks: Sequence[Task], judges: dict[str, build.Run], reader: ChatReader, backbone: Tree) -> Sequence[Task]:
    """The tasks with their scorers of trained value spaces ready to score."""
    ready = {}
    for place, judge in judges.items():
        where = f"config.eval.scorer: svgt:{place}"
        if judge.model.svgt is None:
            raise UserError(f"{where} has no value space ({judge.config.adapter.name}); name the workdir of an SVGT run")
        tree = build.restored(judge, Path(place).expanduser().resolve(), build.fresh_adapters(judge))[1]
        space = {"svgt": tree["svgt"]["value_space"]} | {name: leaves for name, leaves in tree.items() if name != "svgt"}
        params = {"backbone": backbone, "adapters": tree}
        ready[place] = f"{judge.model.svgt.value} {trees.checksum(space)}", Discriminator(reader, judge.model, params)
    return [
        replace(task, scorer=task.scorer.bound(*ready[task.scorer.path])) if value_scorers([task]) else task
        for task in tasks
    ]


def with_adapters_of(run: build.Run, theirs: dict, where: str) -> build.Run:
    """`run` with the adapters that another run's resolved config describes."""
    config = ConfigDict(as_dict(run.config))
    names = str(theirs["adapter"]["name"]).split("+")
    config.svgt.enabled = False  # unless that run had it
    for group in ("adapter", "cal", "svgt", *names):  # baselines take their size from CAL's fields
        known = {field: value for field, value in theirs.get(group, {}).items() if field in config.get(group, {})}
        if known:
            config[group].update(ConfigDict(known))
    config.adapter.init_from = ""
    try:
        check(config)
        return replace(run, config=config, model=makers.make_model(config, run.spec))
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def make_subjects(
    run: build.Run, directory: Path, others: dict[str, tuple[build.Run, Place]], reader: ChatReader, backbone: Tree
) -> list[study.Subject]:
    """The models under test, the frozen one last."""
    models: dict[str, tuple[build.Run, Tree]] = {}
    parts = [part.name for part in run.model.parts]
    if parts and directory not in [place.directory for _, place in others.values()]:
        if others and not build.is_trained(run, directory) and not run.config.adapter.init_from:
            print(f"no checkpoint in {directory}; comparing {', '.join(others)} alone", file=sys.stderr, flush=True)
        else:
            name = "+".join(parts)
            models["this_run" if name in others else name] = run, build.trained_adapters(run, directory)
    for name, (other, place) in others.items():
        step, tree = build.restored(other, place.directory, build.fresh_adapters(other), place.step)
        print(f"{name}: checkpoint of step {step} in {place.directory}", file=sys.stderr, flush=True)
        models[name] = other, tree
    # fresh adapters are the backbone bit for bit, and share the compiled programs of the trained ones; guidance is not
    first, tree = next(iter(models.values()), (run, {}))
    plain, nothing = watched(first, tree) if first.model.svgt is not None else (first, build.fresh_adapters(first))
    fixed = conditions(run)
    subjects = [
        _subject(name, other, reader, backbone, tree, [fixed, *map(repr, other.model.parts), trees.checksum(tree)])
        for name, (other, tree) in models.items()
    ]
    watch = [fixed, FROZEN, *([] if plain.model.svgt is None else [repr(plain.model.svgt), trees.checksum(nothing)])]
    return [*subjects, _subject(FROZEN, plain, reader, backbone, nothing, watch)]


def watched(run: build.Run, tree: Tree) -> tuple[build.Run, Tree]:
    """The frozen backbone, whose replies SVGT's value space judges while it changes nothing (an injection of strength 0)."""
    svgt = run.model.svgt
    idle = replace(svgt, bridge_config=InjectionConfig(svgt.value.embed_dim, svgt.value.value_dim, strength=0.0))
    model = replace(run.model, adapters=(), svgt=idle)
    fresh = model.init_adapters(jax.random.key(0))["svgt"]
    return replace(run, model=model), {"svgt": fresh | {"value_space": tree["svgt"]["value_space"]}}


def conditions(run: build.Run) -> str:
    """What every model's replies depend on beside its adapters: the backbone and how conversations become tokens."""
    return json.dumps([run.source.fingerprint(), run.stored_as, run.tokenizer.fingerprint(), repr(run.policy)])


def _subject(name: str, run: build.Run, reader: ChatReader, backbone: Tree, adapters: Tree, parts: list) -> study.Subject:
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]

    def ask(advance) -> ModelAsk:
        return ModelAsk(
            reader,
            run.model,
            {"backbone": backbone, "adapters": adapters},
            run.stop_ids,
            run.config.eval.batch_size,
            run.config.eval.batch_tokens,
            advance,
        )

    # layers below the first boundary are the backbone's alone
    return study.Subject(name, digest, ask, run.model.first_boundary or None)
