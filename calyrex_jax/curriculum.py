"""SVGT's three-stage curriculum: `--mode=train` with config.svgt.enabled.

    1  the unconditional value space on single texts      2  the conditional one on prompts with replies
    3  the bridge, through the layers above l*, on safe replies

Each stage lives in WORKDIR/stageN: checkpoints (to go on from), best (by validation), metrics.jsonl, report.json. A stage
starts from the best checkpoint of the one before, in this directory or brought by config.adapter.init_from=svgt=DIR.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from calyrex_jax import build, checkpoint, makers
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree
from calyrex_jax.data.prefix_store import PrefixStore
from calyrex_jax.evals.report import write_json
from calyrex_jax.generate.batching import place
from calyrex_jax.judged_texts import encode, load_texts
from calyrex_jax.metrics import Metrics, peak_memory
from calyrex_jax.train import Interrupted, StopSignal, optimizer_item, prefix_place, refuse_divergence, say_interrupted
from calyrex_jax.training import dialogues
from calyrex_jax.training.bridge import make_bridge_loss, make_bridge_step
from calyrex_jax.training.dialogues import Corpus
from calyrex_jax.training.step import TrainState, init_state
from calyrex_jax.training.svgt import BridgeLoss, StageConfig, make_judge, make_judge_step, make_optimizer
from calyrex_jax.training.svgt_metrics import binary_metrics


@dataclass(frozen=True)
class StageData:
    """What one stage learns from and is judged by."""

    train: Corpus
    validation: Corpus


def train(config: ConfigDict, workdir: str) -> int:
    """Runs or resumes the stages of config.svgt.stages; returns the exit status."""
    check(config)
    stages = parse_stages(config.svgt.stages)
    for stage in stages:
        stage_config(config, stage)  # refuses bad values before anything is read
    if jax.process_count() > 1:
        raise UserError("config.svgt.enabled: SVGT's curriculum serves one process; run it on one host")
    directory = prepare_workdir(workdir)
    texts = load_texts(config, stages)
    run = build.open_run(config)
    stop, show = StopSignal(), Metrics(directory)
    try:
        return _train(run, directory, stages, texts, stop, show)
    except Interrupted as signalled:
        return say_interrupted(signalled)
    finally:
        show.close()


def parse_stages(text: str) -> tuple[int, ...]:
    """config.svgt.stages as ascending numbers.

    >>> parse_stages("1,2,3")
    (1, 2, 3)
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not set(parts) <= {"1", "2", "3"} or len(set(parts)) != len(parts):
        raise UserError(f'config.svgt.stages is {text!r}; name one or more of the stages 1, 2 and 3, such as "1,2,3"')
    return tuple(sorted(map(int, parts)))


def stage_config(config: ConfigDict, stage: int) -> StageConfig:
    """config.svgt.stageN as the optimiser takes it; UserError for a value out of range."""
    fields = config.svgt[f"stage{stage}"]
    for name in ("epochs", "batch_size"):
        if fields[name] < 1:
            raise UserError(f"config.svgt.stage{stage}.{name} is {fields[name]}; expected at least 1")
    old = float(fields.get("old_learning_rate", 1e-5))
    return StageConfig(
        stage,
        float(fields.learning_rate),
        old,
        float(config.svgt.weight_decay),
        float(fields.clip_norm),
        fields.warmup_steps,
    )


def _train(run: build.Run, directory: Path, stages, texts, stop: StopSignal, show: Metrics) -> int:
    started = time.monotonic()
    config = run.config
    encoded = {stage: encode(run, stage, *texts[stage], show) for stage in stages}
    first = stages[0]
    own = build.latest_stage(directory, up_to=first - 1)
    brought = "svgt" in makers.init_from(config)
    if first > 1 and own is None and not brought:
        raise UserError(
            f"config.svgt.stages={config.svgt.stages}: stage {first} starts from stage {first - 1}, but {directory} has no "
            f"finished one; train it there, or bring it by config.adapter.init_from=svgt=DIR"
        )
    backbone = build.load_weights(run)
    checksum = trees.checksum(backbone)
    adapters = build.brought_adapters(run)
    if own is not None:
        saved = checkpoint.Checkpoints(own, keep=None, config=as_dict(config))
        adapters |= saved.restore_trainable({"svgt": adapters["svgt"]})[1]
    show.say(f"backbone {run.source.name}: {trees.count(backbone):,} frozen; svgt: {trees.count(adapters['svgt']):,}")
    write_json(directory / "config.json", as_dict(config))
    params = {"backbone": backbone, "adapters": adapters}
    reports = {}
    for stage in stages:
        params, reports[f"stage{stage}"] = run_stage(run, directory, stage, params, encoded[stage], show, stop)
    if trees.checksum(backbone) != checksum:
        raise RuntimeError("the frozen backbone changed during training; this run's result cannot be trusted")
    report = reports | {
        "wall_seconds": time.monotonic() - started,
        "peak_memory_bytes": peak_memory(),
        "parameters": {"frozen": trees.count(backbone), "trainable": trees.count(adapters["svgt"])},
        "backbone_unchanged": True,
        "backbone_sha256": checksum,
    }
    write_json(directory / "report.json", report)
    show.say(f"done in {report['wall_seconds']:.0f} s; backbone unchanged; {directory / 'report.json'}")
    return 0


def run_stage(
    run: build.Run, directory: Path, stage: int, params: Tree, encoded, show: Metrics, stop: StopSignal
) -> tuple[Tree, dict]:
    """Trains one stage, or what is left of it; the parameters with its best checkpoint's, and its report."""
    config, home = run.config, directory / f"stage{stage}"
    trainable = {"svgt": params["adapters"]["svgt"]}
    optimizer = make_optimizer(stage_config(config, stage), trainable)
    state = jax.jit(lambda tree: init_state(optimizer, tree))(trainable)
    saved = checkpoint.Checkpoints(home / "checkpoints", keep=1, config=as_dict(config))
    best = checkpoint.Checkpoints(home / "best", keep=1, config=as_dict(config))
    kept = {"best": None, "seconds": 0.0}
    if saved.latest_step() is not None:
        _, tree, rest, kept = saved.restore(state.trainable, optimizer_item(state))
        state = TrainState(rest["step"], tree, rest["opt_state"], rest["skipped"])
    fields = config.svgt[f"stage{stage}"]
    total = len(dialogues.plan(encoded[0], fields.batch_size, config.train.seed, 0)) * fields.epochs
    if int(state.step) < total:
        if int(state.step):
            show.say(f"stage {stage}: resumed from step {int(state.step)} of {total}")
        runner = _Runner(run, stage, params, optimizer)
        data = StageData(*(Corpus(part, _store(runner, directory, part, show, stop)) for part in encoded))
        if stage == 3 and not int(state.step) and config.svgt.scale_bridge and not run.model.svgt.injects:
            state = state.replace(trainable=_scaled(state.trainable, runner.trigger_length(data.train)))
        with contextlib.closing(Metrics(home)) as logs:
            logs.resume(int(state.step))
            _learn(runner, state, total, data, kept, (saved, best), logs, show, stop)
    saved.close()
    step, found = best.restore_trainable(trainable)
    best.close()
    report = {
        "steps": total,
        "best_step": step,
        "validation": kept["best"]["metrics"],
        "examples": {"training": len(encoded[0]), "validation": len(encoded[1])},
        "wall_seconds": kept["seconds"],
    }
    write_json(home / "report.json", report)
    shown = ", ".join(f"{name} {value:.3f}" for name, value in report["validation"].items())
    show.say(f"stage {stage}: best at step {step} of {total}: {shown}")
    return params | {"adapters": params["adapters"] | found}, report


def _learn(
    runner: _Runner,
    state: TrainState,
    total: int,
    data: StageData,
    kept: dict,
    places: tuple[checkpoint.Checkpoints, checkpoint.Checkpoints],
    logs: Metrics,
    show: Metrics,
    stop: StopSignal,
) -> None:
    """The steps of one stage; judged and saved at every epoch's end. `kept` is what a resumed run must know."""
    started, before = time.monotonic(), kept["seconds"]
    saved, best = places
    train, step, epoch, batches = runner.run.config.train, int(state.step), -1, []

    def save(wait: bool = False) -> None:
        kept["seconds"] = before + time.monotonic() - started
        saved.save(int(state.step), state.trainable, optimizer_item(state), kept, force=True)
        if wait:
            saved.wait()

    with show.phase(f"stage {runner.stage}", total, unit="step", initial=step) as bar:
        while step < total:
            if step // (total // runner.epochs) != epoch:
                epoch = step // (total // runner.epochs)
                batches = dialogues.plan(data.train.examples, runner.rows, train.seed, epoch)
            state, measured = runner.step(state, data.train, batches[step % len(batches)], step)
            step += 1
            bar.update(1, loss=measured["loss"])
            refuse_divergence(measured, step, train.max_skipped, save)
            if step % train.log_every == 0 or step == total:
                logs.log(step, measured | {"epoch": epoch})
            if step % len(batches) == 0:
                found = runner.validate(state, data.validation)
                logs.log(step, {f"validation_{name}": value for name, value in found.items()})
                value = found["accuracy"] if runner.stage < 3 else -found["loss"]
                if kept["best"] is None or value > kept["best"]["value"]:
                    kept["best"] = {"value": value, "step": step, "metrics": found}
                    best.save(step, state.trainable, {"step": state.step}, {}, force=True)
                    best.wait()
                save()
            elif stop.status:
                save(wait=True)
            stop.check()


def _scaled(trainable: Tree, length: float) -> Tree:
    """SVGT's leaves with a bridge whose tokens, and whose φ, are on the scale of states of this length.

    The last norm gives tokens of length √D at a scale of 1, and φ starts there too; beside states many times as long the
    correction would hardly be heard.
    """
    bridge = trainable["svgt"]["bridge"]
    factor = length / bridge["norm"]["scale"].size ** 0.5
    norm = bridge["norm"] | {"scale": bridge["norm"]["scale"] * factor}
    lift = jax.tree.map(lambda leaf: leaf * factor, bridge["lift_out"])
    return {"svgt": trainable["svgt"] | {"bridge": bridge | {"norm": norm, "lift_out": lift}}}


def _store(runner: _Runner, directory: Path, examples, show: Metrics, stop: StopSignal) -> PrefixStore | None:
    """The examples' states at l*, computed where they are not on disk yet; None where they are not to be kept."""
    run, params = runner.run, runner.params
    config, model = run.config, run.model
    if config.svgt.cache == "off":
        return None
    where, key = prefix_place(run, directory, examples)
    prompts = hashlib.sha256(np.asarray([e.prompt_length for e in examples], "<i4").tobytes()).hexdigest()
    others = {name: tree for name, tree in params["adapters"].items() if name != "svgt"}
    key |= {"boundary": model.svgt.boundary, "gap": model.bridge_slots, "prompts": prompts}
    key |= {"adapters": trees.checksum(others) if others else ""}
    lengths = [len(e.tokens) for e in examples]
    store = PrefixStore.open(where, key, lengths, run.spec.embed_dim, config.svgt.cache)
    if missing := store.missing():
        rows = config.eval.batch_size
        with show.phase(f"stage {runner.stage}: states at layer {model.svgt.layer}", len(missing), unit="text") as bar:
            for chosen in dialogues.plan_pass(examples, rows, missing):
                talk = dialogues.assembled([examples[i] for i in chosen], rows)
                states = np.asarray(runner.below(params, talk))
                mask = np.concatenate([talk.prompt_mask, talk.reply_mask], axis=1)
                store.write(chosen, [states[row][mask[row]] for row in range(len(chosen))])
                bar.update(len(chosen))
                stop.check()
    return store


class _Runner:
    """One stage's compiled functions, and how batches reach them."""

    def __init__(self, run: build.Run, stage: int, params: Tree, optimizer):
        config, self.run, self.stage, self.params = run.config, run, stage, params
        c, seed = config.svgt, config.train.seed
        self.rows, self.epochs = c[f"stage{stage}"].batch_size, c[f"stage{stage}"].epochs
        devices = run.mesh.shape["data"] * run.mesh.shape["fsdp"]
        if self.rows % devices:
            raise UserError(
                f"config.svgt.stage{stage}.batch_size={self.rows} does not divide over mesh.data × mesh.fsdp = {devices}; "
                f"choose a multiple of {devices}"
            )
        self.below = jax.jit(run.model.below)
        if stage < 3:
            self._step = jax.jit(
                make_judge_step(run.model.svgt, optimizer, stage, dense=c.dense, seed=seed), donate_argnums=0
            )
            self._judge = jax.jit(make_judge(run.model.svgt))
        else:
            loss = BridgeLoss(float(c.lambda_ce), float(c.lambda_safe), float(c.lambda_reg), c.safe_loss)
            options = {"chunk": config.train.loss_chunk, "compact": run.mesh.size == 1}
            self._step = jax.jit(make_bridge_step(run.model, optimizer, loss, **options), donate_argnums=0)
            self._loss = jax.jit(make_bridge_loss(run.model, loss, **options))

    def step(self, state: TrainState, corpus: Corpus, indices: list[int], number: int) -> tuple[TrainState, dict]:
        if self.stage < 3:
            state, measured = self._step(state, self._examples(corpus, indices))
        else:
            rng = np.random.default_rng([self.run.config.train.seed % 2**32, number])
            state, measured = self._step(state, self.params, *self._dialogue(corpus, indices, rng))
        return state, {name: value.item() for name, value in jax.device_get(measured).items()}

    def validate(self, state: TrainState, corpus: Corpus) -> dict[str, float]:
        """Stages 1 and 2: accuracy, F1, AUROC and ECE at replies' ends; 3: the loss and its parts, with the same triggers always."""
        batches = dialogues.plan_pass(corpus.examples, self.rows)
        if self.stage < 3:
            scores = np.zeros(len(corpus.examples))
            for indices in batches:
                found = jax.device_get(self._judge(state.trainable, self._examples(corpus, indices)))
                scores[indices] = found[: len(indices)]
            return binary_metrics(scores, corpus.labels, f"stage {self.stage}: validation")
        rng, sums = np.random.default_rng(0), {}
        for indices in batches:
            parts = jax.device_get(self._loss(state.trainable, self.params, *self._dialogue(corpus, indices, rng)))
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + float(value) * len(indices)
        return {name: value / len(corpus.examples) for name, value in sums.items()}

    def trigger_length(self, corpus: Corpus) -> float:
        """The median length of the states at l* of the first texts' last prompt positions."""
        indices = list(range(min(self.rows * 8, len(corpus.examples))))
        found = []
        for start in range(0, len(indices), self.rows):
            chosen = indices[start : start + self.rows]
            talk, states = self._dialogue(corpus, chosen)
            last = np.asarray(states[: len(chosen), talk.prompt.shape[1] - 1], np.float32)
            found += np.linalg.norm(last, axis=-1).tolist()
        return float(np.median(found))

    def _dialogue(self, corpus: Corpus, indices: list[int], rng: np.random.Generator | None = None) -> tuple:
        """A batch's dialogue and states, and its triggers where `rng` is given."""
        chosen = [corpus.examples[i] for i in indices]
        talk = place(dialogues.assembled(chosen, self.rows), self._mesh)
        if corpus.store is None:
            states = self.below(self.params, talk)
        else:
            states = place(dialogues.stored_states(corpus, indices, self.rows).astype(self.run.dtype), self._mesh)
        if rng is None:
            return talk, states
        replies = [len(e.tokens) - e.prompt_length for e in chosen]
        triggers = dialogues.draw_triggers(replies, self.rows, self.run.config.svgt.late_triggers, rng)
        return talk, states, place(triggers, self._mesh)

    def _examples(self, corpus: Corpus, indices: list[int]):
        talk, states = self._dialogue(corpus, indices)
        return dialogues.make_examples(talk, states, corpus.labels[indices])

    @property
    def _mesh(self):
        return None if self.run.mesh.size == 1 else self.run.mesh
