"""`turns`: one rule over many turns of which the model itself makes the replies; when is the rule first broken?"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import rules, rules_replies
from calyrex_jax.data.rules_checks import follows, holds, is_answered
from calyrex_jax.data.rules_questions import questions
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Verdict, thinned
from calyrex_jax.evals.tasks.long_context import place
from calyrex_jax.evals.tasks.rules import as_item

# rules that make sense for any question; forbidden letters and words are chosen for one question alone
RULES = frozenset({"begin", "end", "json", "upper", "lower", "begin+end", "begin+upper", "end+upper", "mention"})


@dataclass(frozen=True)
class TurnsTask:
    """turns: questions of one conversation; limit: conversations to hold."""

    turns: int = 10
    limit: int = 0
    seed: int = 0
    new_tokens: int = 48
    name = "turns"
    headline = "turns until the first breach"

    @property
    def about(self) -> str:
        """What is counted."""
        return (
            f"Conversations of {self.turns} held-out questions under one held-out rule; the model's own replies enter the history. "
            "turn k is adherence at the k-th reply, whatever came before; a model that repeats an earlier reply keeps the rule "
            "without answering, so right answers are counted beside it. Turns until the first breach is the mean number of "
            f"the turn at which the rule is first broken; a conversation that never breaks it counts as {self.turns + 1}, so "
            "the mean is a lower bound where many are unbroken."
        )

    def items(self, reader: Reader) -> list[Item]:
        """Conversations, without their replies; UserError where their longest course would not fit."""
        base = [item for item in rules.evaluation_set() if item.rule in RULES and item.variant == "plain"]
        found = [self._item(item) for item in thinned(base, self.limit)]
        for item in found:
            # asked turn by turn: every question, and as many new tokens each as a reply may have
            alone = reader.length([*item.messages, {"role": "user", "content": item.detail["questions"][0]}])
            each = [reader.length([{"role": "user", "content": text}]) for text in item.detail["questions"][1:]]
            most = alone + sum(each) + self.turns * (self.new_tokens + 4)
            if most > reader.positions:
                raise UserError(
                    f"eval task turns: {self.turns} turns can take {most} tokens (item {item.id}), but the backbone has "
                    f"{reader.positions} positions; lower config.eval.turns or config.eval.max_new_tokens"
                )
        return found

    def _item(self, base: rules.Item) -> Item:
        kinds = base.rule.split("+")
        rng = random.Random(f"turns {self.seed} {base.id}")
        values = [str(c.value) for c in base.constraints if isinstance(c.value, str)]
        fitting = [
            question
            for question in questions()
            if question.split == "test"
            and rules_replies.suits(question, kinds)
            # a word that the question or its answer holds anyway would be no sign of the rule
            and not any(holds(" ".join((question.text, *question.answers)), value) for value in values)
        ]
        asked = rng.sample(fitting, self.turns)
        plain = as_item(base)
        detail = {"rule": base.rule, "constraints": plain.detail["constraints"], "questions": [q.text for q in asked]}
        return Item(base.id, plain.messages[:1], detail | {"answers": [q.answers for q in asked]}, judge=(base, asked))

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """Turn by turn, a batch of conversations at a time."""
        for start in range(0, len(items), ask.batch_size):
            yield from self._hold(ask, items[start : start + ask.batch_size])

    def _hold(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        histories = [list(item.messages) for item in items]
        for turn in range(self.turns):
            for history, item in zip(histories, items):
                history.append({"role": "user", "content": item.detail["questions"][turn]})
            for index, answer in ask.generate(histories, self.new_tokens):
                histories[index] = [*histories[index], {"role": "assistant", "content": answer.text}]
        for item, history in zip(items, histories):
            replies = [message["content"] for message in history if message["role"] == "assistant"]
            yield Verdict(item.id, self._scores(item, replies), {"replies": replies})

    def _scores(self, item: Item, replies: Sequence[str]) -> tuple[Score, ...]:
        base, asked = item.judge
        held = [follows(base.constraints, reply) for reply in replies]
        right = [is_answered(reply, question.answers, question.needed) for reply, question in zip(replies, asked)]
        breach = next((turn for turn, good in enumerate(held, 1) if not good), len(held) + 1)
        cells = [f"turn {turn}" for turn in range(1, len(held) + 1)]
        where = place(base.rule)
        return (
            Score(self.headline, breach, kind="mean"),
            Score("adherence, all turns", sum(held), len(held)),
            Score("answers, all turns", sum(right), len(right)),
            Score("follows and answers, all turns", sum(a and b for a, b in zip(held, right)), len(held)),
            Score("never broken", all(held)),
            *(Score(cell, good) for cell, good in zip(cells, held)),
            *(Score(f"{cell}/{where}", good) for cell, good in zip(cells, held)),
            *(Score(f"{cell}/answers", good) for cell, good in zip(cells, right)),
            Score(f"{self.headline}/{where}", breach, kind="mean"),
            Score(f"{self.headline}/by rule/{base.rule}", breach, kind="mean"),
        )

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """Adherence against the turn."""
        found = set(cells)
        points = tuple((turn, f"turn {turn}") for turn in range(1, self.turns + 1) if f"turn {turn}" in found)
        return [Curve("adherence by turn", "turn", points)] if len(points) > 1 else []
