"""`--mode=score` and `--mode=generate`: one line out for every conversation in, in order, written whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path

from ml_collections import ConfigDict

from calyrex_jax import build
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core.errors import UserError
from calyrex_jax.data import chat, sources
from calyrex_jax.evals.report import write_json
from calyrex_jax.generate import loop, score
from calyrex_jax.metrics import Metrics


def run(config: ConfigDict, workdir: str, mode: str, source: str, target: str) -> int:
    """Reads `source`, writes `target`; returns the exit status. The input is checked as a whole before weights are loaded."""
    check(config)
    for flag, value in (("input", source), ("output", target)):
        if not value:
            raise UserError(f"--{flag} is missing; --mode={mode} reads --input=FILE.jsonl and writes --output=FILE.jsonl")
    directory = prepare_workdir(workdir)
    conversations = sources.load_conversations(source)
    check_output(Path(target))
    opened = build.open_run(config)
    asked = [conversation["messages"] for _, conversation in conversations]
    if mode == "generate" and (answered := [messages for messages in asked if messages[-1]["role"] == "assistant"]):
        asked = [messages[:-1] if messages[-1]["role"] == "assistant" else messages for messages in asked]
        print(
            f"{len(answered)} conversations end with a reply; another is generated in its place", file=sys.stderr, flush=True
        )
    where = [place for place, _ in conversations]
    examples = [
        chat.encode(opened.tokenizer, messages, policy=opened.policy, where=place, for_generation=mode == "generate")
        for place, messages in zip(where, asked)
    ]
    backbone = build.load_weights(opened)
    params = {"backbone": backbone, "adapters": build.trained_adapters(opened, directory)}
    write_json(directory / "config.json", as_dict(config))
    show = Metrics(directory)
    if mode == "score":
        lines = _scores(opened, params, examples, where, show)
    else:
        lines = _replies(opened, params, conversations, examples, where, show)
    try:
        write_lines(Path(target), lines)
    finally:
        show.close()
    print(f"{mode}: {len(examples)} lines in {target}", file=sys.stderr, flush=True)
    return 0


def _scores(opened: build.Run, params, examples, where, show: Metrics) -> Iterable[dict]:
    with show.phase("scoring", len(examples), unit="chat") as bar:
        scored = score.stream_scores(
            opened.model,
            params,
            examples,
            pad_id=opened.tokenizer.pad_id,
            batch_size=opened.config.generate.batch_size,
            mesh=opened.mesh,
            where=where,
            progress=lambda done, _: bar.update(done - bar.done),
        )
        for example, logprobs in zip(examples, scored):
            yield {
                "tokens": example.tokens.tolist(),
                "logprobs": [None, *logprobs[1:].tolist()],
                "system_mask": example.system.astype(int).tolist(),
                "target_mask": example.targets.astype(int).tolist(),
            }


def _replies(opened: build.Run, params, conversations, examples, where, show: Metrics) -> Iterable[dict]:
    config = opened.config
    with show.phase("generating", len(examples), unit="chat") as bar:
        replies = loop.stream(
            opened.model,
            params,
            examples,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=build.sampling(config),
            stop_ids=opened.stop_ids,
            pad_id=opened.tokenizer.pad_id,
            batch_size=config.generate.batch_size,
            vocab_limit=opened.tokenizer.vocab_size,
            mesh=opened.mesh,
            where=where,
            progress=lambda done, _: bar.update(done - bar.done),
        )
        for (_, conversation), reply in zip(conversations, replies):
            harm = {} if opened.model.svgt is None else {"harm": list(reply.harm)}
            yield conversation | {
                "completion": opened.tokenizer.decode(reply.text_tokens),
                "tokens": list(reply.tokens),
                "finish_reason": reply.finish_reason,
                **harm,
            }


def check_output(path: Path) -> None:
    """UserError where the output could not be written, before hours of work are spent on it."""
    parent = path.expanduser().resolve().parent
    if path.is_dir() or not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UserError(f"--output={path}: cannot be written; name a file in a directory that exists and can be written")


def write_lines(path: Path, lines: Iterable[dict]) -> None:
    """JSON lines into `path`, which appears only when all are written."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"--output={path}: {error.strerror or error}; free the disk or name another file") from None
    finally:
        part.unlink(missing_ok=True)
