"""`preference`: is the rule's token more probable than the one that breaks it? Far from the rule, and after n violations.

Two replies to one item, one that follows the rule and one that does not, begin alike up to some token; the model is asked for
the probability of both tokens that come next. Nothing is generated, so that one pass over the prompt judges many models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from calyrex_jax.data import rules
from calyrex_jax.data.rules_checks import Constraint, follows
from calyrex_jax.data.rules_questions import Question
from calyrex_jax.data.rules_replies import held_out_sentence, obey
from calyrex_jax.evals.tasks import conflict, long_context
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Pair, Reader, Score, Verdict, check_positions, preferred
from calyrex_jax.evals.tasks.long_context import CELLS, place

KINDS = ("drop", "replace")
PLACES = ("begin", "end")
LIMIT = 200  # base items of either sort where the limit is 0
_DRAWS = 8  # of the corpus's held-out items, so that there are enough


@dataclass(frozen=True)
class PreferenceTask:
    """lengths: tokens between rule and question; shots: examples of the assistant doing what breaks the rule.

    limit      base items with a rule about how a reply begins (begin, json, upper, lower), and as many about its end
    far_limit  the same beyond 1000 tokens or 16 shots, which take so much longer; 0: as many
    """

    lengths: tuple[int, ...] = (0, 500, 2000)
    shots: tuple[int, ...] = (0, 4, 16)
    filler: str = "turns"
    limit: int = 0
    far_limit: int = 0
    seed: int = 0
    name = "preference"
    headline = "rule preferred"
    about = (
        "Teacher-forced: how often, where a reply that follows the rule and one that breaks it part, the token that follows the "
        "rule is the more probable one. N tokens: with so much ordinary conversation between the system prompt and the question, "
        "the other reply being the plain answer. drop and replace, N shots: the user asks to drop or replace the rule after N "
        "turns in which the assistant did as asked. Finer cells: rules about the beginning and the end apart, new words, new "
        "phrasings; margin is the mean difference of the two log-probabilities, in nats."
    )

    def items(self, reader: Reader) -> list[Item]:
        """Every base item at every distance and after every number of shots that fits into the backbone's positions."""
        length = long_context.counter(reader)
        near, far = _base(self.limit or LIMIT), _base(self.far_limit or self.limit or LIMIT)
        found = []
        for tokens in self.lengths:
            for base in near if tokens <= long_context.FAR else far:
                made = long_context.at_distance(base, tokens, self.filler, self.seed, length)
                follower, breaker = _reply(base.constraints, base.question), held_out_sentence(base.question)
                found.append(_item(base, f"{tokens} tokens", made.messages, follower, breaker, made.detail))
        for shots in self.shots:
            for kind in KINDS:
                chosen = near if shots <= conflict.FAR else far
                made = [_attacked(kind, number, base, shots, self.seed) for number, base in enumerate(chosen)]
                found += [item for item in made if item is not None and _fits(reader, item)]
        check_positions(reader, found, 64, "eval task preference")
        return found

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """One preference an item."""
        return preferred(self, ask, items)

    def pair(self, item: Item) -> Pair:
        """The item's conversation with the reply that follows the rule, and with the one that breaks it."""
        follower, breaker = (
            (*item.messages, {"role": "assistant", "content": item.detail[name]}) for name in ("follows", "breaks")
        )
        return follower, breaker

    def prefers(self, item: Item, first: float, second: float) -> tuple[Score, ...]:
        """The scores of the two tokens' log-probabilities."""
        base: rules.Item = item.judge
        where, better = item.detail["where"], first > second
        phrasing = "new phrasings" if "phrasings" in base.cell else "known phrasings"
        words = "new words" if base.cell.startswith("unseen_words") else "known words"
        at = place(base.rule)
        names = (where, f"{where}/{at}", f"{where}/{phrasing}", f"{where}/{phrasing}/{at}", f"{where}/{words}")
        return (
            Score(self.headline, better),
            *(Score(name, better) for name in (*names, f"{where}/by rule/{base.rule}")),
            Score(f"{where}/margin", first - second, kind="mean"),
            Score(f"{where}/margin/{at}", first - second, kind="mean"),
        )

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """The preference against distance and against shots, for rules about the beginning and about the end."""
        cells, found = set(cells), []
        series = [("", self.lengths, "{n} tokens", "tokens between system prompt and question")]
        series += [
            (f"{kind}, ", self.shots, f"{kind}, {{n}} shots", "examples of the assistant complying") for kind in KINDS
        ]
        for label, places, name, xlabel in series:
            for at in PLACES:
                points = tuple((n, f"{name.format(n=n)}/{at}") for n in places)
                points = tuple(point for point in points if point[1] in cells)
                if len(points) > 1:
                    found.append(Curve(f"{label}rules about the {'beginning' if at == 'begin' else at}", xlabel, points))
        return found


def _base(limit: int) -> list[rules.Item]:
    """`limit` held-out items with rules about the beginning and as many about the end, spread over all cells."""
    return [item for items in _pool().values() for item in spread(items, limit)]


@functools.cache
def _pool() -> dict[str, list[rules.Item]]:
    found: dict[str, list[rules.Item]] = {at: [] for at in PLACES}
    for draw in range(_DRAWS):
        for item in rules.evaluation_set(draw):
            at = place(item.rule)
            if item.cell in CELLS and item.variant == "plain" and at in found and _is_clear(item):
                found[at].append(dataclasses.replace(item, id=f"{draw}/{item.id}"))
    return found


def _is_clear(item: rules.Item) -> bool:
    """Whether there is a reply that follows the item's rule, and a plain one that does not."""
    plain = held_out_sentence(item.question)
    return plain is not None and not follows(item.constraints, plain) and _reply(item.constraints, item.question) is not None


def _reply(constraints: Sequence[Constraint], question: Question) -> str | None:
    """The frozen model's own reply, changed so that it follows the constraints."""
    return obey(constraints, question, held_out_sentence(question))


def spread(items: Sequence, count: int) -> list:
    """`count` of the items at equal distances; all of them where there are fewer.

    >>> spread(range(10), 4)
    [0, 2, 5, 7]
    """
    return [items[i * len(items) // count] for i in range(count)] if count < len(items) else list(items)


def _attacked(kind: str, number: int, base: rules.Item, shots: int, seed: int) -> Item | None:
    """The item under attack; None where what the user wants cannot be told from what the rule wants."""
    case = conflict.case_of(kind, base, seed)
    made = conflict.attacked(number, case, shots, seed)
    follower = _reply(case.constraints, case.asked)
    breaker = _reply(case.wanted, case.asked)  # to drop a rule is to want none
    if follower is None or breaker is None or follower == breaker:
        return None
    return _item(base, f"{kind}, {shots} shots", made.messages, follower, breaker, made.detail)


def _item(base: rules.Item, where: str, messages, follower: str, breaker: str, detail) -> Item:
    return Item(f"{where}/{base.id}", messages, {**detail, "where": where, "follows": follower, "breaks": breaker}, base)


def _fits(reader: Reader, item: Item) -> bool:
    return reader.length(item.messages) + 64 <= reader.positions
