"""`--mode=train` of the steering baselines that have no training loop of their own: ITI and RE-Control.

Both learn from the labelled replies of config.svgt.data and leave a checkpoint like any other adapter's, so that generate,
score and eval use them in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from calyrex_jax import build, checkpoint
from calyrex_jax.adapters.re_control import value
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree
from calyrex_jax.evals.report import write_json
from calyrex_jax.judged_texts import encode, load_texts
from calyrex_jax.metrics import Metrics
from calyrex_jax.train import Interrupted, StopSignal, say_interrupted
from calyrex_jax.training import dialogues, iti, re_control
from calyrex_jax.training.svgt_metrics import binary_metrics


def train(config: ConfigDict, workdir: str) -> int:
    """Fits the adapter that config.adapter.name names and saves it; returns the exit status."""
    check(config)
    if config.svgt.enabled:
        raise UserError(f"config.adapter.name={config.adapter.name}: it is fitted alone; set config.svgt.enabled=False")
    directory = prepare_workdir(workdir)
    texts = load_texts(config, (2,))
    run = build.open_run(config)
    stop, show = StopSignal(), Metrics(directory)
    try:
        return _train(run, directory, texts[2], stop, show)
    except Interrupted as signalled:
        return say_interrupted(signalled)
    finally:
        show.close()


def _train(run: build.Run, directory: Path, texts: tuple, stop: StopSignal, show: Metrics) -> int:
    started, config, name = time.monotonic(), run.config, run.config.adapter.name
    parts = encode(run, 2, *texts, show)
    backbone = build.load_weights(run)
    checksum = trees.checksum(backbone)
    fresh = build.fresh_adapters(run)
    found, about = {"iti": _iti, "re_control": _re_control}[name](run, backbone, fresh[name], parts, show, stop)
    tree = {name: jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), found, fresh[name])}
    write_json(directory / "config.json", as_dict(config))
    saved = checkpoint.Checkpoints(directory / "checkpoints", keep=1, config=as_dict(config))
    saved.save(1, tree, {"step": np.ones(1, np.int32)}, {}, force=True)
    saved.close()
    report = about | {
        "steps": 1,
        "examples": {"training": len(parts[0]), "validation": len(parts[1])},
        "wall_seconds": time.monotonic() - started,
        "parameters": {"frozen": trees.count(backbone), "trainable": trees.count(tree)},
        "backbone_unchanged": trees.checksum(backbone) == checksum,
    }
    write_json(directory / "report.json", report)
    show.say(f"{name}: done in {report['wall_seconds']:.0f} s; {directory / 'report.json'}")
    return 0


def _iti(run: build.Run, backbone: Tree, fresh: Tree, parts, show: Metrics, stop: StopSignal) -> tuple[Tree, dict]:
    @jax.jit
    def outputs(backbone: Tree, talk) -> jax.Array:
        last = talk.prompt.shape[1] + talk.reply_mask.sum(-1) - 1
        return iti.head_outputs(run.spec, backbone, talk.batch(0), last).swapaxes(0, 1)

    heads, labels = [], []
    for part in parts:
        made = np.zeros((len(part), run.spec.num_layers, run.spec.num_heads, run.spec.head_dim), np.float32)
        for chosen, states, _ in _states(run, outputs, backbone, part, show, stop):
            made[chosen] = states[: len(chosen)]
        heads.append(made.swapaxes(0, 1))
        labels.append(np.array([example.label for example in part]))
    shift, chosen = iti.fit(run.spec, backbone, heads[0], labels[0], heads[1], labels[1], run.config.iti.heads)
    best = chosen[0]
    show.say(
        f"iti: the best head, {best.head} of layer {best.layer}, has a probe accuracy of {best.accuracy:.1%} on validation"
    )
    return {"shift": shift}, {"heads": [asdict(head) for head in chosen]}


def _re_control(run: build.Run, backbone: Tree, fresh: Tree, parts, show: Metrics, stop: StopSignal) -> tuple[Tree, dict]:
    [(key, leaves)] = fresh.items()
    below = jax.jit(lambda backbone, talk: run.model.prefix(backbone, talk.batch(0)))
    states, labels, ends = [], [], []
    for part in parts:
        rows, marks, last = [], [], np.zeros((len(part), run.spec.embed_dim), np.float32)
        for chosen, found, talk in _states(run, below, backbone, part, show, stop):
            for row, index in enumerate(chosen):
                reply = found[row, talk.prompt.shape[1] :][talk.reply_mask[row]].astype(np.float32)
                rows.append(reply)
                marks += [part[index].label] * len(reply)
                last[index] = reply[-1]
        states.append(np.concatenate(rows))
        labels.append(np.array(marks))
        ends.append(last)
    leaves = re_control.fit(leaves, states[0], labels[0], run.config.train.seed)
    scores = np.asarray(value(leaves, ends[1]))
    metrics = binary_metrics(scores, np.array([example.label for example in parts[1]]), "re_control: validation")
    show.say("re_control: validation: " + ", ".join(f"{name} {v:.3f}" for name, v in metrics.items()))
    return {key: leaves}, {"validation": metrics}


def _states(
    run: build.Run, function: Callable, backbone: Tree, examples, show: Metrics, stop: StopSignal
) -> Iterator[tuple[list[int], np.ndarray, object]]:
    """(indices, what `function` gives for their dialogue, the dialogue), batch by batch."""
    rows = run.config.eval.batch_size
    with show.phase(f"{run.config.adapter.name}: states", len(examples), unit="text") as bar:
        for chosen in dialogues.plan_pass(examples, rows):
            talk = dialogues.assembled([examples[i] for i in chosen], rows)
            yield chosen, np.asarray(function(backbone, talk)), talk
            bar.update(len(chosen))
            stop.check()
