"""`rules`: adherence on the embedded corpus's held-out items, by split (cell), by rule, and right answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from calyrex_jax.data import rules
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Verdict, check_positions, judged, thinned


def as_item(held_out: rules.Item) -> Item:
    """A held-out item of the corpus as tasks take it."""
    detail = {
        "cell": held_out.cell,
        "rule": held_out.rule,
        "variant": held_out.variant,
        "constraints": [asdict(constraint) for constraint in held_out.constraints],
        "answers": list(held_out.question.answers),
    }
    return Item(held_out.id, held_out.messages, detail, judge=held_out)


@dataclass(frozen=True)
class RulesTask:
    """limit: held-out items to use, 0 is all; new_tokens: of a reply, at most."""

    limit: int = 0
    new_tokens: int = 48
    name = "rules"
    headline = "adherence"
    about = (
        "Replies that a checker finds to follow the system prompt's rule, on questions, words, phrasings and a rule family "
        "held out from training. adherence is over all items with a rule; controls have none and must be plain; answers "
        "counts right answers over all items."
    )

    def items(self, reader: Reader) -> list[Item]:
        """The held-out items."""
        found = [as_item(item) for item in thinned(rules.evaluation_set(), self.limit)]
        check_positions(reader, found, self.new_tokens, "eval task rules")
        return found

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """One reply an item."""
        return judged(self, ask, items)

    def judge(self, item: Item, reply: str) -> tuple[Score, ...]:
        """The scores of one reply."""
        held_out: rules.Item = item.judge
        verdict = rules.check(held_out, reply)
        names = [held_out.cell, f"{held_out.cell}/{held_out.rule}"]
        if held_out.constraints:
            names.append(f"by rule/{held_out.rule}")
        over_all = (Score("adherence", verdict.follows),) if held_out.constraints else ()
        return (*over_all, Score("answers", verdict.answered), *(Score(name, verdict.follows) for name in names))

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """None."""
        return []
