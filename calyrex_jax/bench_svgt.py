"""What SVGT costs, as ratios measured in one run: guided against unguided decoding, cached against uncached training.

    python -m calyrex_jax.bench_svgt
    python -m calyrex_jax.bench_svgt --only=decode,recompute --steps=5 --json=svgt.json

K = 5, R = 5, a value space of 128 at the default layer, random parameters (what they say changes nothing of the time). All
ratios are against our own unguided backbone in the same run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax import bench, guidance
from calyrex_jax.adapters.svgt import Svgt, default_layer
from calyrex_jax.adapters.value_bridge import BridgeConfig
from calyrex_jax.adapters.value_space import ValueSpaceConfig
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.types import Tree
from calyrex_jax.generate import loop
from calyrex_jax.metrics import peak_memory
from calyrex_jax.model import Model
from calyrex_jax.training.dialogues import make_examples
from calyrex_jax.training.step import init_state
from calyrex_jax.training.svgt import StageConfig, make_judge_step, make_optimizer
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve

NEW = 128
ROWS, REPLY = 16, 64  # of a batch of stages 1 and 2, behind prompts of bench.PROMPT tokens


def guided_model(spec: DecoderSpec) -> Model:
    """SVGT as configs/svgt_quickstart.py has it."""
    value = ValueSpaceConfig(embed_dim=spec.embed_dim, value_dim=128, num_heads=4)
    bridge = BridgeConfig(spec.embed_dim, 128, num_tokens=5, num_heads=spec.num_heads)
    return Model(spec, (), Svgt(value, bridge, default_layer(spec.num_layers), refresh_every=5, momentum=0.8))


def parameters(model: Model, backbone: Tree) -> Tree:
    """The backbone with random leaves of SVGT."""
    return {"backbone": backbone, "adapters": model.init_adapters(jax.random.key(0))}


def measure_decode(b: bench.Bench) -> Iterator[bench.Line]:
    """Greedy decoding of NEW tokens, prefill included; no reply ends early."""
    model = guided_model(b.spec)
    params = parameters(model, b.load())
    for count, aim in ((1, "≥ 0.87"), (8, "≥ 0.82")):
        prompts = bench.make_prompts(b.spec, count)
        options = {"max_new_tokens": NEW, "stop_ids": (), "pad_id": 0, "batch_size": count}
        tasks = {
            "unguided": partial(loop.generate, Model(b.spec), params, prompts, **options),
            "guided": partial(loop.generate, model, params, prompts, **options),
        }
        speed = {name: bench.rates(count * NEW, seconds) for name, seconds in b.interleaved(tasks).items()}
        yield bench.compare(f"decoding tokens/s, guided, batch {count}", speed["guided"], speed["unguided"], aim)


def measure_recompute(b: bench.Bench) -> Iterator[bench.Line]:
    """Guided decoding against a loop that runs everything anew for each token: one turn is timed, times the tokens."""
    model = guided_model(b.spec)
    params = parameters(model, b.load())
    prompts = bench.make_prompts(b.spec, 1)
    for new in (64, 256):
        talk = _dialogue(b.spec, 1, new)
        whole = jax.jit(
            lambda params, talk: decoder.logits(b.spec, params["backbone"], model.guided(params, talk)[0][:, -1])
        )
        options = {"max_new_tokens": new, "stop_ids": (), "pad_id": 0, "batch_size": 1}
        tasks = {
            "ours": partial(loop.generate, model, params, prompts, **options),
            "turn": lambda whole=whole, talk=talk: jax.block_until_ready(whole(params, talk)),
        }
        seconds = b.interleaved(tasks, most=3)
        naive = [turn * new for turn in seconds["turn"]]
        note = "one turn over the full length × the tokens"
        yield bench.compare(f"seconds of recomputing everything, {new} new tokens", naive, seconds["ours"], note=note)


def measure_stages(b: bench.Bench) -> Iterator[bench.Line]:
    """Texts a second of stages 1 and 2, with the states at l* at hand and without."""
    model = guided_model(b.spec)
    params, talk = parameters(model, b.load()), _dialogue(b.spec, ROWS, REPLY)
    labels = np.arange(ROWS) % 2
    below = jax.jit(model.below)
    states = np.asarray(below(params, talk))
    for stage in (1, 2):
        trainable = {"svgt": params["adapters"]["svgt"]}
        optimizer = make_optimizer(StageConfig(stage, 1e-4), trainable)
        step = jax.jit(make_judge_step(model.svgt, optimizer, stage))
        state = jax.jit(lambda tree, optimizer=optimizer: init_state(optimizer, tree))(trainable)

        def run(cached: bool, step=step, state=state, stage=stage) -> None:
            found = make_examples(talk, states if cached else below(params, talk), labels)
            if stage == 1:
                found = found.replace(prompt=None, prompt_mask=None)
            jax.block_until_ready(step(state, found))

        seconds = b.interleaved({"cached": partial(run, True), "uncached": partial(run, False)})
        speed = {name: bench.rates(ROWS, measured) for name, measured in seconds.items()}
        yield bench.compare(f"texts/s of stage {stage}, cached / uncached", speed["cached"], speed["uncached"], "≥ 5")


def measure_memory(b: bench.Bench) -> Iterator[bench.Line]:
    """Peak resident memory of processes that load the checkpoint and write one reply."""
    peaks = {}
    for kind in ("guided", "unguided"):
        command = [sys.executable, "-m", "calyrex_jax.bench_svgt", "--child", kind, "--checkpoint", str(b.directory)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the process that decodes ({kind}) ended with {done.returncode}: {done.stderr[-2000:]}")
        peaks[kind] = [int(done.stdout.split()[-1]) / 1e6]
    yield bench.compare(
        "peak MB of decoding, guided", peaks["guided"], peaks["unguided"], "≤ 1.03", "each in its own process"
    )


def child(kind: str, directory: Path) -> None:
    """Writes one reply and prints this process's peak resident memory in bytes."""
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    model = guided_model(spec)
    params = parameters(model, load_backbone(source, spec, jnp.float32))
    model = model if kind == "guided" else Model(spec)
    loop.generate(model, params, bench.make_prompts(spec, 1), max_new_tokens=NEW, stop_ids=(), pad_id=0, batch_size=1)
    print(peak_memory())


def _dialogue(spec: DecoderSpec, rows: int, reply: int) -> guidance.Dialogue:
    """Random prompts of bench.PROMPT tokens and replies of `reply`, without padding."""
    tokens = np.random.default_rng(2).integers(0, spec.vocab_size, (rows, bench.PROMPT + reply), dtype=np.int32)
    mask = np.ones(tokens.shape, bool)
    span = np.broadcast_to(np.arange(bench.SPAN, dtype=np.int32), (rows, bench.SPAN))
    at = bench.PROMPT
    return guidance.Dialogue(tokens[:, :at], mask[:, :at], tokens[:, at:], mask[:, at:], span)


MEASURE = {
    "decode": measure_decode,
    "recompute": measure_recompute,
    "stages": measure_stages,
    "memory": measure_memory,
}


if __name__ == "__main__":
    about = f"K=5, R=5, {NEW} new tokens after {bench.PROMPT}, float32; theirs: ours without guidance, or without the cache"
    sys.exit(bench.main(sys.argv[1:], MEASURE, child, about, "calyrex_jax.bench_svgt"))
