"""`--mode=analyze`: where in depth the system prompt's rule lives, in report.json, report.html and analysis/arrays.npz.

Pairs of conversations that differ in the rule alone are compared (distance, cosine), read (linear probes) and mixed
(activation patching) at every point in depth; where the adapter is CAL, its attention onto the system text is mapped.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from calyrex_jax import build
from calyrex_jax.adapters.cal import Cal
from calyrex_jax.analysis import attention, findings, page, pairs, patching
from calyrex_jax.analysis.probes import ProbeSettings
from calyrex_jax.analysis.states import Shape, Walk
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree
from calyrex_jax.evals.report import write_json
from calyrex_jax.evaluate import kept_report
from calyrex_jax.generate.batching import max_positions
from calyrex_jax.metrics import Metrics
from calyrex_jax.train import Interrupted, StopSignal


@dataclass(frozen=True)
class Settings:
    """config.analyze, its texts understood."""

    pairs: pairs.PairSettings
    probe: ProbeSettings
    batch_size: int
    distances: tuple[int, ...]
    attention_pairs: int


def analyze(config: ConfigDict, workdir: str) -> int:
    """Runs the analysis of --workdir's newest checkpoint; returns the exit status."""
    check(config)
    settings = analyze_settings(config)
    directory = prepare_workdir(workdir)
    run = build.open_run(config)
    Walk(run.model, {})  # refuses adapters that it cannot walk
    made = pairs.make_pairs(settings.pairs, run.tokenizer, run.policy)
    cal = next((adapter for adapter in run.model.adapters if isinstance(adapter, Cal)), None)
    far = distant(run, settings, made) if cal is not None else []
    backbone = build.load_weights(run)
    params = {"backbone": backbone, "adapters": build.trained_adapters(run, directory)}
    write_json(directory / "config.json", as_dict(config))
    stop, show = StopSignal(), Metrics(directory)
    try:
        _run(run, directory, settings, made, cal, far, params, stop, show)
    except Interrupted as signalled:
        print("interrupted: nothing was written; the same command begins anew", file=sys.stderr, flush=True)
        return signalled.args[0]
    finally:
        show.close()
    return 0


def analyze_settings(config: ConfigDict) -> Settings:
    """config.analyze as the analysis takes it; UserError for a value out of range."""
    a = config.analyze
    least = {"pairs": 4, "folds": 2, "permutations": 1, "batch_size": 2, "attention_pairs": 1}
    for field, low in least.items():
        if a[field] < low:
            raise UserError(f"config.analyze.{field} is {a[field]}; expected at least {low}")
    if a.batch_size % 2:
        raise UserError(f"config.analyze.batch_size is {a.batch_size}; expected an even number: conversations come in pairs")
    try:
        distances = tuple(sorted({int(part) for part in a.distances.split(",")}))
    except ValueError:
        distances = (-1,)
    if min(distances) < 0:
        raise UserError(f"config.analyze.distances is {a.distances!r}; expected numbers of tokens such as 0,200,800")
    probe = ProbeSettings(a.folds, a.permutations, a.seed)
    return Settings(
        pairs.PairSettings(pairs.parse_rules(a.rules), a.pairs, a.seed), probe, a.batch_size, distances, a.attention_pairs
    )


def distant(run: build.Run, settings: Settings, made: list[pairs.Pair]) -> list[list[pairs.Reading]]:
    """The first pairs' conversations at every distance; UserError where one is longer than the backbone's positions."""
    chosen = made[: settings.attention_pairs]
    found = [[pairs.at_distance(p, tokens, run.tokenizer, run.policy) for p in chosen] for tokens in settings.distances]
    longest, limit = max(len(reading.tokens) for group in found for reading in group), max_positions(run.spec)
    if longest > limit:
        raise UserError(
            f"config.analyze.distances: a conversation has {longest} tokens, but the backbone has {limit} positions; "
            "lower the largest"
        )
    return found


def _run(
    run: build.Run,
    directory: Path,
    settings: Settings,
    made: list[pairs.Pair],
    cal: Cal | None,
    far: list[list[pairs.Reading]],
    params: Tree,
    stop: StopSignal,
    show: Metrics,
) -> None:
    walk, facts = Walk(run.model, params), [pair.fact for pair in made]
    points = walk.points
    about = describe(run, settings, made)
    show.say(f"{about.splitlines()[0]} {needs(run, settings, made, len(points))}")

    def counted(bar):
        def advance(count: int) -> None:
            bar.update(count)
            stop.check()

        return advance

    with show.phase("patching", len(points) * len(made), unit="point") as bar:
        measured = patching.measure(walk, made, settings.batch_size, counted(bar))
    seen = None
    if cal is not None:
        with show.phase("attention", sum(map(len, far)), unit="chat") as bar:
            seen = attention.collect(run.model, params, cal, far, settings.distances, advance=counted(bar))
    with show.phase("probes", len(points), unit="point") as bar:
        found = findings.summarise(points, facts, measured, settings.probe, counted(bar))
    content = findings.arrays(points, facts, measured, found, seen)
    findings.write_arrays(directory / "analysis" / "arrays.npz", content)
    part = {"pairs": len(made), "rules": list(settings.pairs.rules), "adapter": adapter_names(run)}
    part |= findings.as_json(found, seen) | {"arrays": {name: findings.ARRAYS[name] for name in content}}
    write_json(directory / "report.json", kept_report(directory / "report.json") | {"analysis": part})
    print(page.write(directory, about, made, found, seen), page.told(found), sep="\n\n", flush=True)
    show.say(f"done: {directory / 'report.json'}, {directory / 'report.html'}, {directory / 'analysis' / 'arrays.npz'}")


def adapter_names(run: build.Run) -> str:
    """The adapters that are analysed, "cal", or "none"."""
    return "+".join(adapter.name for adapter in run.model.adapters) or "none"


def describe(run: build.Run, settings: Settings, made: list[pairs.Pair]) -> str:
    """What is analysed, for the report."""
    first, second = settings.pairs.rules
    rules = f"two words under the rule {first}" if first == second else f"the rules {first} and {second}"
    blocks = f", blocks at {', '.join(map(str, run.model.boundaries))}" if run.model.boundaries else ""
    return (
        f"{len(made)} pairs of conversations, {rules}; {run.config.backbone.source}, {run.spec.num_layers} layers, adapter "
        f"{adapter_names(run)}{blocks}.\n\nThe two conversations of a pair differ in the system text alone, which has as many "
        "tokens in both. Points in depth are named by the number of layers before them; 26+ lies behind the adapter's block "
        "at boundary 26. Intervals are 95 % bootstraps over pairs."
    )


def needs(run: build.Run, settings: Settings, made: list[pairs.Pair], points: int) -> str:
    """What the analysis will take, in one line."""
    shape = Shape.of([reading for pair in made for reading in pair.first], settings.batch_size)
    states = 4 * shape.rows * shape.length * run.spec.embed_dim * run.dtype.itemsize
    kept = points * len(made) * 2 * len(patching.PLACES) * run.spec.embed_dim * 4
    runs = -(-2 * len(made) // shape.rows) * points * len(patching.PATCHES)
    return (
        f"{runs} partial runs of {shape.rows} × {shape.length} tokens; beside weights and one run's own memory "
        f"{(states + kept) / 2**20:.0f} MiB for states."
    )
