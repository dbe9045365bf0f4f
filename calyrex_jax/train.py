"""Training, one linear loop read top to bottom: corpus, frozen backbone, prefix cache, steps, checks, report.

`--mode=train` resumes by itself from DIR/checkpoints. SIGTERM and Ctrl-C save first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from ml_collections import ConfigDict

from calyrex_jax import build, checkpoint
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Batch, Tree
from calyrex_jax.data import chat, corpus, parts, pipeline
from calyrex_jax.data.prefix_store import PrefixStore
from calyrex_jax.evals import quickstart
from calyrex_jax.evals.report import write_json
from calyrex_jax.evals.tasks.api import numbers
from calyrex_jax.makers import FITTED
from calyrex_jax.metrics import QUIET_SECONDS, Metrics, peak_memory
from calyrex_jax.sharding.processes import row_group
from calyrex_jax.sharding.rules import batch_sharding
from calyrex_jax.training import sft
from calyrex_jax.training.optimizer import learning_rate, make_optimizer
from calyrex_jax.training.step import TrainState, init_state, jit_train_step, state_shardings


class Interrupted(Exception):
    """SIGTERM or Ctrl-C arrived; carries the exit status."""


class StopSignal:
    """Remembers a signal until the loop reaches a point where everything can be saved.

    Of several processes all must stop after the same step: there jax's preemption service takes SIGTERM, tells the others,
    and names the step.
    """

    def __init__(self):
        self.status = 0
        self._several = jax.process_count() > 1
        if self._several:
            signal.signal(signal.SIGINT, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number, frame) -> None:
        if self.status:  # asked twice: go at once
            sys.exit(self.status)
        self.status = 128 + number

    def agree(self, step: int) -> None:
        """To be called after every step: learns of a signal that any of several processes got."""
        if self._several and multihost_utils.reached_preemption_sync_point(step):
            self.status = 128 + signal.SIGTERM

    def check(self) -> None:
        if self.status:
            raise Interrupted(self.status)


def train(config: ConfigDict, workdir: str) -> int:
    """Runs or resumes a training run; returns the exit status."""
    check(config)
    build.optimizer_config(config)  # refuses bad values before anything is read
    keep_steps(config)
    if jax.process_count() > 1 and config.eval.after_training:
        raise UserError(
            f"config.eval.after_training={config.eval.after_training}: evaluation serves one process; set it to '' here and "
            "run --mode=eval on one host afterwards"
        )
    directory = prepare_workdir(workdir)
    sources = corpus_parts(config)
    run = build.open_run(config)
    if not run.model.adapters:
        raise UserError(
            "config.adapter.name=prompt_only has nothing to train; use score, generate or eval, or name an adapter"
        )
    if fitted := [adapter.name for adapter in run.model.adapters if adapter.name in FITTED]:
        raise UserError(f"config.adapter.name: {fitted[0]} is fitted, not trained; run it alone, adapter.name={fitted[0]}")
    stop, show = StopSignal(), Metrics(directory)
    try:
        examples, corpus_report = load_corpus(run, sources, directory, show, stop)
        return _train(run, directory, examples, corpus_report, stop, show)
    except Interrupted as signalled:
        return say_interrupted(signalled)
    finally:
        show.close()


def keep_steps(config: ConfigDict) -> tuple[int, ...]:
    """The steps of config.train.keep_steps, ascending; UserError where it is no list of numbers."""
    text = config.train.keep_steps
    return numbers(text, "config.train.keep_steps", 1, 10**9) if text else ()


def say_interrupted(signalled: Interrupted) -> int:
    """Tells that a run was stopped; returns its exit status."""
    print(
        "interrupted: everything finished so far is saved; the same command goes on from there", file=sys.stderr, flush=True
    )
    return signalled.args[0]


def corpus_parts(config: ConfigDict) -> tuple[parts.Part, ...]:
    """The parts of config.data.source; UserError where its text makes no sense or a file is absent."""
    found = parts.parse_source(config.data.source, size=config.data.size, seed=config.data.seed)
    for part in found:
        parts.files_of(part)
    return found


def load_corpus(
    run: build.Run, sources: tuple[parts.Part, ...], directory: Path, show: Metrics, stop: StopSignal
) -> tuple[corpus.Corpus, chat.CorpusReport]:
    """The examples to train on and the account of them, encoded as a whole, and kept on disk, before anything else runs."""
    data, started, counts = run.config.data, time.monotonic(), [0, QUIET_SECONDS]

    def advance(count: int) -> None:
        counts[0] += count
        if (seconds := time.monotonic() - started) > counts[1]:
            show.say(f"encoding the corpus: {counts[0]:,} conversations, {counts[0] / seconds:.0f} a second")
            counts[1] = seconds + QUIET_SECONDS
        stop.check()

    token_dir = Path(data.token_dir or directory / "tokens")
    return corpus.load_corpus(run.tokenizer, run.policy, sources, data.max_length, token_dir, data.seed, advance)


def _train(
    run: build.Run, directory: Path, examples, corpus_report: chat.CorpusReport, stop: StopSignal, show: Metrics
) -> int:
    started = time.monotonic()
    config, model, mesh = run.config, run.model, run.mesh
    show.say(f"corpus: {corpus_report.line()}")
    if (warning := chat.base_model_warning(run.tokenizer, run.policy)) is not None:
        show.say(f"warning: {warning}")
    for notice in build.notices(run, any(example.distill for example in examples)):
        show.say(f"notice: {notice}")

    # The frozen backbone, and the trainable tree with its optimiser.
    backbone = build.load_weights(run)
    checksum = trees.checksum(backbone)
    adapters = build.brought_adapters(run, backbone)
    settings = build.optimizer_config(config)
    optimizer = make_optimizer(settings, adapters)
    state, placed = place_state(optimizer, adapters, mesh)
    show.say(
        f"backbone {run.source.name}: {trees.count(backbone):,} frozen; {'+'.join(adapters)}: {trees.count(adapters):,} trained"
    )

    # The data, and where an earlier run of this directory left off.
    store = open_prefix_store(run, directory, examples)
    batches = make_batches(run, examples, store)
    kept = keep_steps(config)
    saved = checkpoint.Checkpoints(directory / "checkpoints", config.train.keep, as_dict(config), kept)
    seconds_before = 0.0
    if saved.latest_step() is not None:
        state, data_state = restore(saved, state, config.train.reset_optimizer)
        batches.set_state(data_state["batches"])
        seconds_before = data_state["seconds"]
        show.say(f"resumed from step {int(state.step)} of {config.train.steps}")
    if jax.process_index() == 0:
        write_json(directory / "config.json", as_dict(config))
    show.resume(int(state.step))

    if store is not None and store.missing():
        fill_prefixes(run, directory, backbone, examples, store, show, stop)

    # The steps.
    step_fn = jit_train_step(
        model,
        optimizer,
        placed,
        mesh,
        accumulate=config.train.accumulate,
        chunk=config.train.loss_chunk,
        seed=config.train.seed,
    )
    rate = learning_rate(settings)
    meter = Meter()
    step = int(state.step)

    def save(wait: bool = False) -> None:
        data_state = {"batches": batches.get_state(), "seconds": seconds_before + time.monotonic() - started}
        saved.save(int(state.step), state.trainable, optimizer_item(state), data_state, force=True)
        if wait:
            saved.wait()

    with show.phase("training", config.train.steps, unit="step", initial=step) as bar:
        while step < config.train.steps:
            batch, info = next(batches)
            state, measured = step_fn(state, backbone, place_batch(batch, mesh))
            step += 1
            measured = {name: value.item() for name, value in jax.device_get(measured).items()}
            meter.add(measured)
            bar.update(1, loss=measured["loss"], tokens_per_second=meter.tokens_per_second())
            refuse_divergence(measured, step, config.train.max_skipped, save)
            if step % config.train.log_every == 0 or step == config.train.steps:
                show.log(step, meter.flush() | {"learning_rate": float(rate(step - 1)), "epoch": info.epoch})
            stop.agree(step)
            if step % config.train.save_every == 0 or step in (*kept, config.train.steps) or stop.status:
                save(wait=bool(stop.status))
            stop.check()
    batches.close()
    saved.close()

    # What came of it.
    if trees.checksum(backbone) != checksum:
        raise RuntimeError("the frozen backbone changed during training; this run's result cannot be trusted")
    last = meter.last or last_logged(directory)  # nothing was left to do but the evaluation
    report = {
        "steps": step,
        "metrics": last,
        "tokens_per_second": meter.overall() or last["tokens_per_second"],
        "wall_seconds": seconds_before + time.monotonic() - started,
        "peak_memory_bytes": peak_memory(),
        "parameters": {"frozen": trees.count(backbone), "trainable": trees.count(state.trainable)},
        "conversations": {"read": corpus_report.read, "kept": corpus_report.kept, "dropped": dict(corpus_report.dropped)},
        "backbone_unchanged": True,
        "backbone_sha256": checksum,
    }
    if config.eval.after_training == "rules":
        judge = quickstart.Judge(
            model,
            run.tokenizer,
            run.policy,
            run.stop_ids,
            config.eval.batch_size,
            config.eval.max_new_tokens,
            config.eval.limit,
        )
        variants = {"frozen": build.fresh_adapters(run), "adapted": state.trainable}
        report["evaluation"] = quickstart.evaluate(judge, backbone, variants, directory, show, stop.check)
        report["wall_seconds"] = seconds_before + time.monotonic() - started
        print(quickstart.as_report(report["evaluation"], directory, read_losses(directory)), flush=True)
    if jax.process_index() == 0:
        write_json(directory / "report.json", report)
    show.say(f"done: {step} steps in {report['wall_seconds']:.0f} s; backbone unchanged; {directory / 'report.json'}")
    return 0


class Meter:
    """Rates and means between two logged steps."""

    def __init__(self):
        self.last: dict = {}
        self._counts = {"tokens": 0, "targets": 0}
        self._since = self._start = time.monotonic()
        self._all, self._first = 0, None
        self._measured: dict = {}

    def add(self, measured: dict) -> None:
        """Counts one step's metrics. The first step, which compiles, does not count towards the overall rate."""
        for name in self._counts:
            self._counts[name] += int(measured[name])
        self._measured = measured
        if self._first is None:
            self._first = time.monotonic()
        else:
            self._all += int(measured["tokens"])

    def tokens_per_second(self) -> float:
        """Since the last logged step."""
        return self._counts["tokens"] / max(time.monotonic() - self._since, 1e-9)

    def overall(self) -> float | None:
        """Tokens a second over all steps but the first; None for fewer than two."""
        return self._all / (time.monotonic() - self._first) if self._all else None

    def flush(self) -> dict:
        """What to log now; starts the next interval."""
        now = time.monotonic()
        rates = {f"{name}_per_second": count / max(now - self._since, 1e-9) for name, count in self._counts.items()}
        self.last = {name: self._measured[name] for name in ("loss", "grad_norm", "skipped")} | rates
        self._counts, self._since = dict.fromkeys(self._counts, 0), now
        return self.last


def fill_prefixes(
    run: build.Run, directory: Path, backbone: Tree, examples, store: PrefixStore, show: Metrics, stop: StopSignal
) -> None:
    """Computes what the prefix cache lacks, under a progress bar; what is done stays when a signal stops it."""
    below = lower_prefixes(run, directory, examples)
    todo = sum(len(examples[i].tokens) for i in store.missing())
    with show.phase("prefix cache", todo, unit="tok") as bar:

        def advance(tokens: int) -> None:
            bar.update(tokens)
            stop.check()

        sft.fill_prefix_store(run.model, backbone, examples, store, advance, below)


def place_state(optimizer: optax.GradientTransformation, adapters: Tree, mesh: Mesh) -> tuple[TrainState, Tree]:
    """The first train state on the mesh, and its shardings: optimiser moments lie where their parameters lie."""
    placed = state_shardings(optimizer, adapters, mesh)
    return jax.jit(lambda tree: init_state(optimizer, tree), out_shardings=placed)(adapters), placed


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """A host's rows as global arrays, sharded over the data and fsdp axes."""
    rows = batch_sharding(mesh)
    return jax.tree.map(lambda a: jax.make_array_from_process_local_data(rows, np.asarray(a)), batch)


def optimizer_item(state: TrainState) -> Tree:
    """What is saved beside the adapters: all of the train state that they are not."""
    return {"opt_state": state.opt_state, "step": state.step, "skipped": state.skipped}


def restore(saved: checkpoint.Checkpoints, state: TrainState, reset_optimizer: bool) -> tuple[TrainState, dict]:
    """The newest saved state and the data order's; with reset_optimizer the moments start afresh."""
    if reset_optimizer:
        step, trainable, data_state = saved.restore_without_optimizer(state.trainable)
        return state.replace(trainable=trainable, step=state.step + step), data_state
    _, trainable, rest, data_state = saved.restore(state.trainable, optimizer_item(state))
    return TrainState(rest["step"], trainable, rest["opt_state"], rest["skipped"]), data_state


def open_prefix_store(run: build.Run, directory: Path, examples) -> PrefixStore | None:
    """The prefix cache of this run's backbone, tokenizer, boundary and data; None where it is switched off."""
    dtype = run.config.data.prefix_cache
    if dtype == "off" or run.model.first_boundary == 0:  # nothing is frozen below: build.notices says so
        return None
    if jax.process_count() > 1:
        raise UserError("config.data.prefix_cache: the prefix cache serves one process; set it to off on several hosts")
    lengths = [len(example.tokens) for example in examples]
    where, key = prefix_place(run, directory, examples)
    return PrefixStore.open(where, key | {"boundary": run.model.first_boundary}, lengths, run.spec.embed_dim, dtype)


def lower_prefixes(run: build.Run, directory: Path, examples) -> tuple[int, PrefixStore] | None:
    """The highest boundary below this run's whose states are in the same cache directory without loss, and their store."""
    dtype = run.config.data.prefix_cache
    if jnp.dtype(dtype).itemsize < run.dtype.itemsize:
        return None
    lengths = [len(example.tokens) for example in examples]
    where, key = prefix_place(run, directory, examples)
    for boundary in range(run.model.first_boundary - 1, 0, -1):
        store = PrefixStore.finished(where, key | {"boundary": boundary}, lengths, run.spec.embed_dim, dtype)
        if store is not None:
            return boundary, store
    return None


def prefix_place(run: build.Run, directory: Path, examples) -> tuple[Path | str, dict]:
    """Where frozen states are kept, and the key of all that they depend on but the boundary."""
    key = {
        "checkpoint": run.source.fingerprint(),
        "backbone_dtype": run.stored_as,
        "tokenizer": run.tokenizer.fingerprint(),
        "data": pipeline.fingerprint(examples),
    }
    return run.config.data.prefix_dir or directory / "prefix", key


def make_batches(run: build.Run, examples, store: PrefixStore | None) -> pipeline.Batches:
    """The run's batches; UserError as `build.check_batch`."""
    config = run.config
    build.check_batch(config, run.mesh)
    group, groups = row_group(run.mesh)
    return pipeline.Batches(
        examples,
        batch_size=config.train.batch_size,
        max_length=config.data.max_length,
        packing=config.data.packing,
        seed=config.train.seed,
        prefix_store=store,
        process_index=group,
        process_count=groups,
    )


def refuse_divergence(measured: dict, step: int, most: int, save) -> None:
    """Stops after `most` non-finite steps in a row; the parameters are those of the last finite step, and saved."""
    if measured["skipped"] >= most:
        save(wait=True)
        raise UserError(
            f"training: {most} steps in a row up to step {step} gave a loss or gradient that is not finite; the adapters are "
            "those of the last finite step; lower config.train.learning_rate, or look for broken rows in config.data.source"
        )


def last_logged(directory: Path) -> dict:
    """What `Meter.flush` gave at the last logged step of an earlier process."""
    line = json.loads((directory / "metrics.jsonl").read_text().splitlines()[-1])
    return {name: line[name] for name in ("loss", "grad_norm", "skipped", "tokens_per_second", "targets_per_second")}


def read_losses(directory: Path) -> tuple[list[int], list[float]]:
    """(steps, losses) of DIR/metrics.jsonl, for the plot."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines], [float(line["loss"]) for line in lines]
