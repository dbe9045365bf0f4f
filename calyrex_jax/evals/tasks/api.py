"""What a task is: items that are the same for every model, and verdicts on what one model made of them.

    class Shout:                                     # a frozen dataclass; its fields are its settings
        name, headline, about, new_tokens = "shout", "loud", "Does the model shout when told to?", 8

        def items(self, reader): return [Item("0", ({"role": "system", "content": "Shout."}, …))]

        def run(self, ask, items): return judged(self, ask, items)

        def judge(self, item, reply): return (Score("loud", reply.isupper()),)

Items are independent of each other: a verdict that an earlier run wrote is kept, and only the missing items are run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from calyrex_jax.core.errors import UserError

Messages = Sequence[Mapping[str, str]]
Pair = tuple[Messages, Messages]  # two conversations that begin alike


@dataclass(frozen=True)
class Item:
    """One thing to ask every model.

    id        unique within the task under its settings; what the pairs of a comparison are made of
    messages  the conversation as it is before the model says anything
    detail    JSON values that an auditor wants to see; with the messages they decide whether an old verdict still holds
    judge     whatever the task needs to judge by; not written
    """

    id: str
    messages: tuple[Mapping[str, str], ...]
    detail: Mapping[str, Any] = field(default_factory=dict)
    judge: Any = None


@dataclass(frozen=True)
class Score:
    """What one item adds to one cell: `total` over `count`.

    kind  "rate" (hits over tries), "mean", or "perplexity" (log-probability over tokens, in nats)
    """

    cell: str
    total: float
    count: float = 1.0
    kind: str = "rate"


@dataclass(frozen=True)
class Verdict:
    """What became of one item: its scores, at most one a cell, and what an audit needs.

    said  JSON values: {"reply": …} of a single answer, {"replies": […]} of several
    """

    item: str
    scores: tuple[Score, ...]
    said: Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """One reply: its text without the stop token, "stop" or "length", and with SVGT the harm probability while it was written."""

    text: str
    finish_reason: str
    harm: tuple[float, ...] = ()


@dataclass(frozen=True)
class Scored:
    """One conversation's tokens, log p(token | those before it) (entry 0 is NaN), and which of them belong to replies."""

    tokens: np.ndarray
    logprobs: np.ndarray
    targets: np.ndarray


class Reader(Protocol):
    """What tasks may know of the tokenizer and the backbone while they make their items."""

    positions: int

    def length(self, messages: Messages, *, for_generation: bool = True, where: str = "") -> int:
        """Tokens of a conversation, the opening of the reply included."""


class Ask(Protocol):
    """The one model under test. All methods batch by length and yield (index, result) as soon as a batch is done."""

    batch_size: int

    def generate(self, conversations: Sequence[Messages], max_new_tokens: int) -> Iterator[tuple[int, Answer]]:
        """Greedy replies."""

    def score(self, conversations: Sequence[Messages]) -> Iterator[tuple[int, Scored]]:
        """Log-probabilities of whole conversations."""

    def prefer(self, pairs: Sequence[Pair]) -> Iterator[tuple[int, tuple[float, float]]]:
        """Log-probabilities of the first tokens in which the two conversations of each pair differ, after what they share."""


@dataclass(frozen=True)
class Curve:
    """Cells to be drawn against a number: title, x label, and (x, cell) in order."""

    title: str
    xlabel: str
    points: tuple[tuple[float, str], ...]


class Task(Protocol):
    """One evaluation; implementations are frozen dataclasses, whose fields are compared when verdicts are reused."""

    name: str
    headline: str  # the cell that stands for the task
    about: str  # what its cells mean, for the report

    def items(self, reader: Reader) -> list[Item]:
        """What will be asked. Everything a user can get wrong is refused here, before weights are loaded."""

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """Verdicts on the given items (all, or those still missing), in any order."""

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """What of the cells found is to be drawn against a number."""


class AskOnce(Task, Protocol):
    """A task that asks every item once and judges the reply's text; models that share layers then read a prompt once."""

    new_tokens: int

    def judge(self, item: Item, reply: str) -> tuple[Score, ...]:
        """The scores of one reply."""


class AskPair(Task, Protocol):
    """A task that asks which of two replies to an item a model prefers; models that share layers read a prompt once."""

    def pair(self, item: Item) -> Pair:
        """The item's conversation with either reply."""

    def prefers(self, item: Item, first: float, second: float) -> tuple[Score, ...]:
        """The scores of two log-probabilities, as `Ask.prefer` gives them."""


def preferred(task: AskPair, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
    """The run of a task that asks for preferences."""
    for index, logprobs in ask.prefer([task.pair(item) for item in items]):
        yield verdict_on_pair(task, items[index], logprobs)


def verdict_on_pair(task: AskPair, item: Item, logprobs: tuple[float, float]) -> Verdict:
    """What a task makes of one preference."""
    return Verdict(item.id, task.prefers(item, *logprobs), {"logprobs": list(logprobs)})


def judged(task: AskOnce, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
    """The run of a task that asks once."""
    for index, answer in ask.generate([item.messages for item in items], task.new_tokens):
        yield verdict_on(task, items[index], answer)


def verdict_on(task: AskOnce, item: Item, answer: Answer) -> Verdict:
    """What a task that asks once makes of one reply."""
    said = {"reply": answer.text, "finish_reason": answer.finish_reason}
    if answer.harm:
        said["harm"] = [round(value, 5) for value in answer.harm]
    return Verdict(item.id, task.judge(item, answer.text), said)


def thinned(items: Sequence, limit: int) -> list:
    """Every n-th of the items, so that about `limit` are left and all cells are met; 0 is all.

    >>> thinned(range(10), 3)
    [0, 3, 6, 9]
    """
    return list(items[:: max(len(items) // limit, 1)] if limit else items)


def check_positions(reader: Reader, items: Sequence[Item], new_tokens: int, where: str) -> None:
    """UserError for the first item that does not fit into the backbone's positions together with its reply.

    With no new tokens the item's last message is its reply.
    """
    for item in items:
        size = reader.length(item.messages, for_generation=new_tokens > 0, where=f"{where}: {item.id}")
        if size + new_tokens > reader.positions:
            more = f" and {new_tokens} new ones" if new_tokens else ""
            raise UserError(
                f"{where}: item {item.id} has {size} tokens{more}, but the backbone has {reader.positions} positions; "
                "ask for less, or name a backbone with more"
            )


def numbers(text: str, field_name: str, low: int, high: int) -> tuple[int, ...]:
    """A comma-separated field as whole numbers in ascending order; UserError naming the field.

    >>> numbers("2000,500", "config.eval.context_lengths", 0, 32768)
    (500, 2000)
    """
    try:
        found = sorted({int(part) for part in text.split(",") if part.strip()})
    except ValueError:
        found = []
    if not found or found[0] < low or found[-1] > high:
        raise UserError(f'{field_name} is {text!r}, expected whole numbers from {low} to {high}, such as "0,16,64"')
    return tuple(found)
