"""`--mode=train` of what is computed and not trained: ITI's shifts, from the labelled replies of config.svgt.data.

Leaves a checkpoint like any other adapter's, so that generate, score and eval use it in the same way.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from calyrex_jax import build, checkpoint
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import trees
from calyrex_jax.core.types import Tree
from calyrex_jax.curriculum import encode, load_texts
from calyrex_jax.evals.report import write_json
from calyrex_jax.metrics import Metrics
from calyrex_jax.train import Interrupted, StopSignal, say_interrupted
from calyrex_jax.training import dialogues, iti


def train(config: ConfigDict, workdir: str) -> int:
    """Computes the shifts and saves them; returns the exit status."""
    check(config)
    directory = prepare_workdir(workdir)
    texts = load_texts(config, (2,))
    run = build.open_run(config)
    stop, show = StopSignal(), Metrics(directory)
    try:
        return _fit(run, directory, texts[2], stop, show)
    except Interrupted as signalled:
        return say_interrupted(signalled)
    finally:
        show.close()


def _fit(run: build.Run, directory: Path, texts: tuple, stop: StopSignal, show: Metrics) -> int:
    started, config = time.monotonic(), run.config
    parts = encode(run, 2, *texts, show)
    backbone = build.load_weights(run)
    checksum = trees.checksum(backbone)
    heads = [_heads(run, backbone, part, show, stop) for part in parts]
    labels = [np.array([example.label for example in part]) for part in parts]
    shift, chosen = iti.fit(run.spec, backbone, heads[0], labels[0], heads[1], labels[1], config.iti.heads)
    like = build.fresh_adapters(run)
    tree = {"iti": {"shift": jax.device_put(shift, like["iti"]["shift"].sharding)}}
    write_json(directory / "config.json", as_dict(config))
    saved = checkpoint.Checkpoints(directory / "checkpoints", keep=1, config=as_dict(config))
    saved.save(1, tree, {"step": np.ones(1, np.int32)}, {}, force=True)
    saved.close()
    report = {
        "steps": 1,
        "heads": [asdict(head) for head in chosen],
        "examples": {"training": len(parts[0]), "validation": len(parts[1])},
        "wall_seconds": time.monotonic() - started,
        "parameters": {"frozen": trees.count(backbone), "trainable": trees.count(tree)},
        "backbone_unchanged": trees.checksum(backbone) == checksum,
    }
    write_json(directory / "report.json", report)
    best = chosen[0]
    show.say(
        f"iti: {len(chosen)} heads; the best, head {best.head} of layer {best.layer}, has a probe accuracy of "
        f"{best.accuracy:.1%} on validation; {directory / 'report.json'}"
    )
    return 0


def _heads(run: build.Run, backbone: Tree, examples, show: Metrics, stop: StopSignal) -> np.ndarray:
    """[L, examples, N, H] at the replies' last tokens."""
    rows, found = run.config.eval.batch_size, None

    @jax.jit
    def outputs(backbone: Tree, talk) -> jax.Array:
        batch = talk.batch(0)
        last = talk.prompt.shape[1] + talk.reply_mask.sum(-1) - 1
        return iti.head_outputs(run.spec, backbone, batch, last)

    with show.phase("iti: heads' outputs", len(examples), unit="text") as bar:
        for chosen in dialogues.plan_pass(examples, rows):
            talk = dialogues.assembled([examples[i] for i in chosen], rows)
            made = np.asarray(outputs(backbone, talk))
            if found is None:
                found = np.zeros((made.shape[0], len(examples), *made.shape[2:]), np.float32)
            found[:, chosen] = made[:, : len(chosen)]
            bar.update(len(chosen))
            stop.check()
    return found
