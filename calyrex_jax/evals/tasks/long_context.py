"""`long_context`: the held-out rules with ordinary conversation between the system prompt and the final question."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from calyrex_jax.data import rules
from calyrex_jax.evals.tasks import ordinary
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Verdict, check_positions, judged, thinned
from calyrex_jax.evals.tasks.rules import as_item

LONGEST = 32_000
FAR = 1000  # tokens
CELLS = ("seen_words", "unseen_words", "seen_styles", "unseen_phrasings", "unseen_words_and_phrasings")


@dataclass(frozen=True)
class LongContextTask:
    """lengths: tokens between the system prompt and the question; filler: "turns" of plain chat, or one "passage".

    limit      held-out items to use, each at every length
    far_limit  those to use beyond FAR tokens, which take so much longer; 0: as many
    """

    lengths: tuple[int, ...] = (0, 500, 2000)
    filler: str = "turns"
    limit: int = 0
    seed: int = 0
    new_tokens: int = 48
    far_limit: int = 0
    name = "long_context"
    headline = "adherence"

    @property
    def about(self) -> str:
        """What stands between rule and question."""
        between = {
            "turns": "ordinary turns, whose replies are plain and so show the rule broken as well as far away",
            "passage": "one neutral text in the user's message, ahead of the question",
        }[self.filler]
        return (
            f"Adherence to held-out rules with so many tokens between the system prompt and the question: {between}. The same "
            "items at every length; begin and end are the rules about how a reply begins (begin, json, upper, lower) and ends."
        )

    def items(self, reader: Reader) -> list[Item]:
        """Every base item at every length."""
        base = [item for item in rules.evaluation_set() if item.cell in CELLS and item.variant == "plain"]

        length = counter(reader)
        near, far = thinned(base, self.limit), thinned(base, self.far_limit or self.limit)
        chosen = [(item, n) for item in near for n in self.lengths if n <= FAR or not self.far_limit]
        chosen += [(item, n) for item in far for n in self.lengths if n > FAR and self.far_limit]
        found = [at_distance(item, tokens, self.filler, self.seed, length) for item, tokens in chosen]
        check_positions(reader, found, self.new_tokens, "eval task long_context (config.eval.context_lengths)")
        return found

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """One reply an item."""
        return judged(self, ask, items)

    def judge(self, item: Item, reply: str) -> tuple[Score, ...]:
        """The scores of one reply."""
        base: rules.Item = item.judge
        verdict = rules.check(base, reply)
        cell = f"{item.detail['distance']} tokens"
        names = dict.fromkeys((cell, f"{cell}/{place(base.rule)}", f"{cell}/{base.cell}", f"{cell}/by rule/{base.rule}"))
        return (
            Score("adherence", verdict.follows),
            *(Score(name, verdict.follows) for name in names),
            Score(f"{cell}/answers", verdict.answered),
            Score(f"{cell}/follows and answers", verdict.follows and verdict.answered),
        )

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """Adherence against distance: all rules, those about the beginning, those about the end."""
        cells = set(cells)
        found = []
        for title, suffix in (("adherence", ""), ("rules about the beginning", "/begin"), ("rules about the end", "/end")):
            points = tuple((n, f"{n} tokens{suffix}") for n in self.lengths if f"{n} tokens{suffix}" in cells)
            if len(points) > 1:
                found.append(Curve(title, "tokens between system prompt and question", points))
        return found


def counter(reader: Reader) -> Callable[..., int]:
    """Tokens of texts as turns of user and assistant; remembered, for the same ones stand in many items."""

    @functools.cache
    def length(*texts: str) -> int:
        roles = ("user", "assistant") * len(texts)
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts)]
        return reader.length(messages, for_generation=False)

    return length


def at_distance(base: rules.Item, tokens: int, filler: str, seed: int, length: Callable[..., int]) -> Item:
    """A held-out item with so many tokens between its system prompt and its question."""
    plain = as_item(base)
    rng = random.Random(f"long context {seed} {base.id}")  # longer fillings begin as the shorter ones do
    system, *rest = plain.messages
    if filler == "turns":
        between = ordinary.turns(tokens, rng, length) if tokens else []
        messages = [system, *between, *rest]
    else:
        shell = length("")
        text = ordinary.passage(tokens, rng, lambda sentence: length(sentence) - shell)
        question = {"role": "user", "content": f"{text}\n\n{rest[-1]['content']}".strip()}
        messages = [system, *rest[:-1], question]
    detail = {**plain.detail, "distance": tokens}
    return Item(f"{tokens}/{base.id}", tuple(messages), detail, judge=base)


def place(rule: str) -> str:
    """Where a rule bites: "begin", "end", or "other"."""
    kinds = set(rule.split("+"))
    if kinds <= {"begin", "json", "upper", "lower"}:
        return "begin"
    return "end" if kinds == {"end"} else "other"
