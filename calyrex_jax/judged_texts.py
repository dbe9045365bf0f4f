"""What SVGT's stages and its steering baselines learn from: labelled texts and safe replies, read, split and encoded."""

from __future__ import annotations

import numpy as np
from ml_collections import ConfigDict

from calyrex_jax import build
from calyrex_jax.core.errors import UserError
from calyrex_jax.data import labelled, privacy, sources
from calyrex_jax.data.labelled import EncodedLabelled, Labelled
from calyrex_jax.metrics import Metrics

ABOUT = {1: "single texts", 2: "prompts with replies", 3: "safe replies"}


def load_texts(config: ConfigDict, stages: tuple[int, ...]) -> dict[int, tuple[list[Labelled], list[Labelled], str]]:
    """{stage: (training, validation, what was dropped)}, read and checked as a whole before weights are loaded."""
    c, seed, found = config.svgt, config.data.seed, {}
    if not 0 < c.validation < 1:
        raise UserError(f"config.svgt.validation is {c.validation}; expected a share between 0 and 1, such as 0.1")
    fractions = (1 - c.validation, c.validation)
    pairs = ([], [], "")
    if set(stages) & {1, 2} or not c.safe_data:
        if not c.data:
            raise UserError(f"config.svgt.data is empty; name labelled texts: {labelled.FORMS}")
        examples, report = labelled.load_labelled(c.data, seed=seed, size=c.size)
        if c.data == "privacy":  # has a validation set of its own, with other names
            pairs = examples, privacy.validation_set(seed, max(round(c.size * c.validation), 16)), report.line()
        else:
            pairs = *labelled.split(examples, seed, fractions), report.line()
    if 1 in stages:
        alone = [[Labelled((), e.response, e.label, e.where) for e in part] for part in pairs[:2]]
        found[1] = *alone, pairs[2]
    if 2 in stages:
        found[2] = *([e for e in part if e.messages] for part in pairs[:2]), pairs[2]
        if not found[2][0] or not found[2][1]:
            raise UserError(f"config.svgt.data={c.data}: stage 2 learns from prompts with replies, but it has texts alone")
    if 3 in stages:
        found[3] = _safe(config, pairs, fractions)
    return found


def _safe(config: ConfigDict, pairs: tuple, fractions: tuple) -> tuple[list[Labelled], list[Labelled], str]:
    c, seed = config.svgt, config.data.seed
    if not c.safe_data:
        parts = [[e for e in part if e.messages and not e.label] for part in pairs[:2]]
        if not parts[0] or not parts[1]:
            raise UserError(
                f"config.svgt.data={c.data}: no safe replies with prompts for stage 3; name config.svgt.safe_data"
            )
        return *parts, f"{len(parts[0]) + len(parts[1])} safe replies of {c.data}"
    if c.safe_data == "privacy":
        made = privacy.safe_conversations(seed, max(c.size // 2, 16))
        chats = [(f"privacy:{number}", chat) for number, chat in enumerate(made)]
    else:
        chats = sources.load_conversations(c.safe_data)
    safe = [
        Labelled(tuple(chat["messages"][:-1]), chat["messages"][-1]["content"], 0, where)
        for where, chat in chats
        if len(chat["messages"]) > 1 and chat["messages"][-1]["role"] == "assistant"
    ]
    if len(safe) < 2:
        raise UserError(
            f"config.svgt.safe_data={c.safe_data}: {len(safe)} conversations end with a reply; 2 or more are needed"
        )
    order = np.random.default_rng([seed % 2**32, 3]).permutation(len(safe))
    cut = min(max(round(len(safe) * fractions[1]), 1), len(safe) - 1)
    line = f"kept {len(safe)} of {len(chats)} conversations"
    return [safe[i] for i in order[cut:]], [safe[i] for i in order[:cut]], line


def encode(
    run: build.Run, stage: int, training: list[Labelled], validation: list[Labelled], dropped: str, show: Metrics
) -> list[list[EncodedLabelled]]:
    """Tokens of a stage's training and validation part; says what was kept."""
    found = []
    for name, part in (("training", training), ("validation", validation)):
        encoded, account = labelled.encode_labelled_corpus(
            run.tokenizer, part, run.policy, run.config.svgt.max_length, both=stage < 3
        )
        if not encoded:
            raise UserError(
                f"stage {stage}: no {name} example is left; {account.line()}; raise config.svgt.max_length or bring more"
            )
        found.append(encoded)
        show.say(f"stage {stage}, {ABOUT[stage]}: {name}: {account.line()}" + (f"; {dropped}" if name == "training" else ""))
    return found
