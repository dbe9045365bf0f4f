"""Labelled examples, harmful or safe: read from the usual data sets, cleaned, split, and turned into tokens.

examples, report = load_labelled("beavertails:data/330k/train.jsonl.gz")
train, validation = split(examples, seed=0, fractions=(0.9, 0.1))
rows, report = encode_labelled_corpus(tokenizer, train, max_length=512, policy=policy)
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import privacy
from calyrex_jax.data.account import Account
from calyrex_jax.data.chat import ChatPolicy, encode_all
from calyrex_jax.data.labelled_rows import SCHEMAS, Judged
from calyrex_jax.data.labelled_types import Labelled, LabelledReport
from calyrex_jax.data.tables import data_files, read_table
from calyrex_jax.data.tokenizer import Tokenizer

FORMS = f"FILE.jsonl, {', '.join(f'{name}:PATH' for name in SCHEMAS)} (PATH may be hf:OWNER/NAME), or privacy"
_BLOCK = 512  # examples tokenised in one parallel call


@dataclass(frozen=True)
class EncodedLabelled:
    """A labelled example in tokens.

    tokens         [T] int32, the prompt and then the response with its end-of-turn token
    system         [T] bool, true where a token has a character of the caller's system text
    prompt_length  how many of the tokens are the prompt's, the opening of the reply included; 0 for a text alone
    label          1 harmful, 0 safe
    """

    tokens: np.ndarray
    system: np.ndarray
    prompt_length: int
    label: int


def load_labelled(source: str, *, seed: int = 0, size: int = 4000) -> tuple[list[Labelled], LabelledReport]:
    """The labelled examples that a source names, cleaned, and the account of what was dropped.

        load_labelled("wildguardmix:hf:allenai/wildguardmix")
        load_labelled("judged.jsonl")      # {"text", "label"} or {"prompt" or "messages", "response", "label"}

    Rows without a label and without a text are dropped and counted, and so are duplicates: of rows that differ in nothing
    but the label, the label of the majority is kept, none at a tie. `seed` and `size` are of the embedded corpus, "privacy".
    Raises UserError with file:line at the first malformed row, and where fewer than both labels are left.
    """
    if source == "privacy":
        found = privacy.training_set(seed, size)
        report = LabelledReport(read=len(found), files=[source])
    else:
        found, report = _read(source)
    kept = _deduplicated(found, report)
    report.kept, report.harmful = len(kept), sum(example.label for example in kept)
    if report.harmful in (0, report.kept):
        what = "no example is left" if not kept else f"every label is {kept[0].label}"
        raise UserError(f"{source}: {what}, both labels are needed; {report.line()}")
    return kept, report


def split(examples: Sequence[Labelled], seed: int, fractions: tuple[float, float] = (0.9, 0.1)) -> tuple[list, list]:
    """Training and validation examples: seeded, with equal shares of both labels, no response text in both.

    Examples with one response text stay together, whatever their prompts and labels. Raises UserError where a part would
    lack one of the labels.
    """
    groups: dict[str, list[int]] = {}
    for index, example in enumerate(examples):
        groups.setdefault(_plain(example.response), []).append(index)
    order = sorted(groups)
    random.Random(f"split {seed}").shuffle(order)
    order.sort(key=lambda text: -len(groups[text]))  # stable: large groups first, then as shuffled
    totals = Counter(example.label for example in examples)
    missing = [{label: share / sum(fractions) * n for label, n in totals.items()} for share in fractions]
    parts: tuple[list[int], list[int]] = ([], [])
    for text in order:
        counts = Counter(examples[index].label for index in groups[text])
        needs = [sum(n * part[label] for label, n in counts.items()) for part in missing]
        chosen = needs.index(max(needs))
        parts[chosen].extend(groups[text])
        for label, n in counts.items():
            missing[chosen][label] -= n
    train, validation = ([examples[index] for index in sorted(part)] for part in parts)
    for name, part in (("training", train), ("validation", validation)):
        if {example.label for example in part} != {0, 1}:
            raise UserError(
                f"{len(examples)} labelled examples ({totals[1]} harmful) are too few: the {name} part of {fractions} would "
                "lack one of the labels; bring more examples of both, or other fractions"
            )
    return train, validation


def encode_labelled_corpus(
    tokenizer: Tokenizer, examples: Sequence[Labelled], policy: ChatPolicy, max_length: int, both: bool = True
) -> tuple[list[EncodedLabelled], Account]:
    """Tokens of examples, and the account of those dropped: prompts of more than half of `max_length`, or more than that in all.

    Nothing is cut. A conversation is rendered once, with its reply: the prompt is what stands before the reply's first token,
    and what follows the end-of-turn token is left off. A text alone is tokenised as it is.
    Raises UserError where `both` and the labels left are not of both kinds.
    """
    account, found = Account(read=len(examples)), []
    for at in range(0, len(examples), _BLOCK):
        block = examples[at : at + _BLOCK]
        for example, encoded in zip(block, _encode(block, tokenizer, policy)):
            if reason := _misfit(encoded, max_length):
                account.drop(reason, example.where)
            else:
                found.append(encoded)
    account.kept = len(found)
    if both and {encoded.label for encoded in found} != {0, 1}:
        raise UserError(
            f"labelled data: both labels are needed, but {account.line()}; raise the greatest length ({max_length})"
        )
    return found, account


def _read(source: str) -> tuple[list[Labelled], LabelledReport]:
    name, colon, path = source.partition(":")
    if not colon or name not in SCHEMAS:
        name, path = "jsonl", source
        if not source.endswith((".jsonl", ".jsonl.gz")):
            raise UserError(f"labelled data: {source!r} is not understood; expected {FORMS}")
    files, left_out = data_files(path, f"labelled data {source}")
    report = LabelledReport(files=[str(file) for file in files], left_out=left_out)
    found, judge = [], SCHEMAS[name]
    for file in files:
        for where, row in read_table(file):
            report.read += 1
            judged = judge(row, where)
            if reason := _gap(judged):
                report.drop(reason, where)
            else:
                found.append(Labelled(judged.messages, judged.response, int(judged.label), where))  # type: ignore[arg-type]
    return found, report


def _gap(judged: Judged) -> str | None:
    """The reason why a row is of no use."""
    if judged.label is None:
        return "without a label"
    if judged.response is None or not judged.response.strip():
        return "without a text"
    users = [message for message in judged.messages if message["role"] != "system"]
    return "without a prompt" if judged.messages and not any(m["content"].strip() for m in users) else None


def _deduplicated(examples: Sequence[Labelled], report: LabelledReport) -> list[Labelled]:
    same: dict[tuple, list[Labelled]] = {}
    for example in examples:
        key = (*((m["role"], _plain(m["content"])) for m in example.messages), _plain(example.response))
        same.setdefault(key, []).append(example)
    kept = []
    for group in same.values():
        harmful = sum(example.label for example in group)
        if 2 * harmful == len(group):
            for example in group:
                report.drop("with contradicting labels", example.where)
            continue
        label = int(2 * harmful > len(group))
        first = next(example for example in group if example.label == label)
        kept.append(first)
        for example in group:
            if example is not first:
                report.drop("duplicates" if example.label == label else "outvoted by their duplicates", example.where)
    return kept


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _encode(examples: Sequence[Labelled], tokenizer: Tokenizer, policy: ChatPolicy) -> list[EncodedLabelled]:
    chats = [i for i, example in enumerate(examples) if example.messages]
    rows = [
        (examples[i].where, [*examples[i].messages, {"role": "assistant", "content": examples[i].response}]) for i in chats
    ]
    encoded = dict(zip(chats, encode_all(tokenizer, rows, policy, False)))
    texts = [i for i in range(len(examples)) if i not in encoded]
    alone = dict(zip(texts, tokenizer.encode_offsets([examples[i].response for i in texts]) if texts else []))
    found = []
    for index, example in enumerate(examples):
        if index in encoded:
            full = encoded[index]
            end = int(np.flatnonzero(full.targets)[-1]) + 1
            before = np.flatnonzero(~full.targets[:end])
            start = int(before[-1]) + 1 if len(before) else 0
            found.append(EncodedLabelled(full.tokens[:end], full.system[:end], start, example.label))
        else:
            tokens = alone[index][0]
            found.append(EncodedLabelled(tokens, np.zeros(len(tokens), bool), 0, example.label))
    return found


def _misfit(encoded: EncodedLabelled, max_length: int) -> str | None:
    if encoded.prompt_length > max_length // 2:
        return f"with a prompt of more than {max_length // 2} tokens"
    return f"of more than {max_length} tokens" if len(encoded.tokens) > max_length else None
