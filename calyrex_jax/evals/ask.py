"""One model under test, as tasks see it: conversations in, replies or log-probabilities out, batched by length.

Conversations run from the longest to the shortest, so that results come out batch by batch; long ones get fewer rows a
batch, so that a batch holds no more than `batch_tokens` tokens. One compiled program serves each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from calyrex_jax.core.types import Tree, bucket
from calyrex_jax.data import chat
from calyrex_jax.data.tokenizer import Tokenizer
from calyrex_jax.evals.tasks.api import Answer, Messages, Pair, Scored
from calyrex_jax.generate import loop, score
from calyrex_jax.generate.continuations import Prompt, compared_choices
from calyrex_jax.model import Model


@dataclass(frozen=True)
class ChatReader:
    """Conversations to tokens; `positions` is how many the backbone was made for."""

    tokenizer: Tokenizer
    policy: chat.ChatPolicy
    positions: int

    def encode(self, messages: Messages, *, for_generation: bool = True, where: str = "") -> chat.Example:
        """Tokens and masks of one conversation."""
        plain = [dict(message) for message in messages]
        return chat.encode(
            self.tokenizer, plain, for_generation=for_generation, policy=self.policy, where=where or "conversation"
        )

    def length(self, messages: Messages, *, for_generation: bool = True, where: str = "") -> int:
        """Tokens of a conversation."""
        return len(self.encode(messages, for_generation=for_generation, where=where).tokens)


@dataclass(frozen=True)
class ModelAsk:
    """A model with its parameters, {"backbone", "adapters"}, and how it is run.

    batch_size    rows a batch, at most
    batch_tokens  tokens a batch, at most (one row is always allowed)
    advance       called with the number of conversations that a batch finished; may raise to stop
    """

    reader: ChatReader
    model: Model
    params: Tree
    stop_ids: frozenset[int]
    batch_size: int
    batch_tokens: int
    advance: Callable[[int], None] = lambda count: None

    def generate(self, conversations: Sequence[Messages], max_new_tokens: int) -> Iterator[tuple[int, Answer]]:
        """(index, greedy reply) in the order in which they are made."""
        prompts = [self.reader.encode(messages) for messages in conversations]
        for rows, chosen in self.batches([len(p.tokens) for p in prompts], max_new_tokens):
            options = self.options(rows, max_new_tokens)
            replies = loop.stream(self.model, self.params, [prompts[index] for index in chosen], **options)
            for index, reply in zip(chosen, replies):
                yield index, self.answer(reply)

    def score(self, conversations: Sequence[Messages]) -> Iterator[tuple[int, Scored]]:
        """(index, log-probabilities) in the order in which they are made."""
        examples = [self.reader.encode(messages, for_generation=False) for messages in conversations]
        for rows, chosen in self.batches([len(e.tokens) for e in examples], 0):
            scored = score.stream_scores(
                self.model,
                self.params,
                [examples[index] for index in chosen],
                pad_id=self.reader.tokenizer.pad_id,
                batch_size=rows,
                progress=self.progress(),
            )
            for index, logprobs in zip(chosen, scored):
                yield index, Scored(examples[index].tokens, logprobs, examples[index].targets)

    def prefer(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, tuple[float, float]]]:
        """(index, log-probabilities of the first tokens in which a pair's conversations differ) in the order made."""
        for index, found in prefer_together({"": self}, pairs):
            yield index, found[""]

    def options(self, rows: int, max_new_tokens: int) -> dict[str, Any]:
        """What `loop.stream` and `loop.stream_compare` are told alike."""
        tokenizer = self.reader.tokenizer
        return {
            "max_new_tokens": max_new_tokens,
            "stop_ids": self.stop_ids,
            "pad_id": tokenizer.pad_id,
            "batch_size": rows,
            "vocab_limit": tokenizer.vocab_size,
            "progress": self.progress(),
        }

    def answer(self, reply: loop.Reply) -> Answer:
        """A reply as tasks read it."""
        return Answer(self.reader.tokenizer.decode(reply.text_tokens), reply.finish_reason, reply.harm)

    def batches(self, lengths: Sequence[int], new_tokens: int) -> Iterator[tuple[int, list[int]]]:
        """(rows a batch, indices from the longest to the shortest): runs of conversations that get as many rows."""
        runs: dict[int, list[int]] = {}
        for index in sorted(range(len(lengths)), key=lambda index: (-bucket(lengths[index]), index)):
            runs.setdefault(rows_for(lengths[index] + new_tokens, self.batch_size, self.batch_tokens), []).append(index)
        yield from runs.items()

    def progress(self) -> Callable[[int, int], None]:
        """`progress` of loop.stream, which counts from the start of its run, as `advance`, which counts on."""
        seen = 0

        def progress(done: int, tokens: int) -> None:
            nonlocal seen
            self.advance(done - seen)
            seen = done

        return progress


def generate_together(
    asks: Mapping[str, ModelAsk], conversations: Sequence[Messages], max_new_tokens: int
) -> Iterator[tuple[int, dict[str, Answer]]]:
    """(index, {name: greedy reply}) of several models whose adapters begin at the same boundary, which read a prompt once."""
    first = next(iter(asks.values()))
    prompts = [first.reader.encode(messages) for messages in conversations]
    for rows, chosen in first.batches([len(p.tokens) for p in prompts], max_new_tokens):
        replies = loop.stream_compare(
            {name: (ask.model, ask.params["adapters"]) for name, ask in asks.items()},
            first.params["backbone"],
            [prompts[index] for index in chosen],
            **first.options(rows, max_new_tokens),
        )
        for found in replies:
            (row,) = {reply.row for reply in found.values()}
            yield chosen[row], {name: first.answer(reply) for name, reply in found.items()}


def rows_for(length: int, batch_size: int, batch_tokens: int) -> int:
    """Rows a batch for conversations of `length` tokens: `batch_size`, or the power of two that keeps to `batch_tokens`.

    >>> [rows_for(n, 64, 32768) for n in (100, 600, 8000, 40000)]
    [64, 32, 4, 1]
    """
    allowed = max(batch_tokens // bucket(length), 1)
    return batch_size if allowed >= batch_size else 1 << (allowed.bit_length() - 1)


def prefer_together(
    asks: Mapping[str, ModelAsk], pairs: Sequence[Pair]
) -> Iterator[tuple[int, dict[str, tuple[float, float]]]]:
    """(index, {name: what `ModelAsk.prefer` gives}) of models whose adapters begin at one boundary: each context read once."""
    first = next(iter(asks.values()))
    parted = [_parting(first.reader, *pair) for pair in pairs]
    subjects = {name: (ask.model, ask.params["adapters"]) for name, ask in asks.items()}
    for rows, chosen in first.batches([len(context.tokens) for context, _ in parted], 0):
        found = compared_choices(
            subjects,
            first.params["backbone"],
            [parted[index][0] for index in chosen],
            [parted[index][1] for index in chosen],
            pad_id=first.reader.tokenizer.pad_id,
            batch_size=rows,
            progress=first.progress(),
        )
        for at, by_name in found:
            yield chosen[at], {name: (float(lines[0]), float(lines[1])) for name, (lines, _) in by_name.items()}


def _parting(reader: ChatReader, left: Messages, right: Messages) -> tuple[Prompt, tuple[int, int]]:
    """What two conversations share from the start, and the first token of each thereafter."""
    a, b = (reader.encode(messages, for_generation=False) for messages in (left, right))
    size = min(len(a.tokens), len(b.tokens))
    differs = np.flatnonzero(a.tokens[:size] != b.tokens[:size])
    if not len(differs):
        raise ValueError("one of the two conversations is the beginning of the other")
    at = int(differs[0])
    return Prompt(a.tokens[:at], a.system[:at]), (int(a.tokens[at]), int(b.tokens[at]))
