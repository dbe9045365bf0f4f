"""`perplexity`: how well plain replies are predicted, the embedded plain chats' or those of a user's conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import rules, sources
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Scored, Verdict, check_positions, thinned

_SEED, _COUNT = -1, 400  # of validation


@dataclass(frozen=True)
class PerplexityTask:
    """path: a JSONL file of conversations with replies, "" the embedded chats under irrelevant system texts."""

    path: str = ""
    limit: int = 0
    name = "perplexity"
    headline = "perplexity"
    about = (
        "exp of the mean negative log-probability of the replies' tokens, teacher-forced, one mean over all tokens; the "
        "bootstrap resamples conversations, and a difference is the ratio of the two perplexities."
    )

    def items(self, reader: Reader) -> list[Item]:
        """The conversations; UserError with file:line for one without a reply."""
        if self.path:
            given = sources.load_conversations(self.path)
        else:
            given = [(f"{self.name}:{number}", chat) for number, chat in enumerate(self.embedded())]
        for where, chat in given:
            if chat["messages"][-1]["role"] != "assistant" or not chat["messages"][-1]["content"].strip():
                raise UserError(f"{where}: the last message is no reply; perplexity needs one to predict")
        found = [Item(str(number), tuple(chat["messages"])) for number, (_, chat) in enumerate(given)]
        found = thinned(found, self.limit)
        check_positions(reader, found, 0, f"eval task {self.name}, {self.path or 'embedded conversations'}")
        return found

    def embedded(self) -> list[dict]:
        """The conversations where no file is given."""
        return rules.plain_chats()

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """Scores whole conversations."""
        for index, scored in ask.score([item.messages for item in items]):
            total, count = reply_logprob(scored)
            verdict = (Score(self.headline, total, count, "perplexity"),)
            yield Verdict(items[index].id, verdict, {"logprob": total, "tokens": count})

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """None."""
        return []


@dataclass(frozen=True)
class ValidationTask(PerplexityTask):
    """path: as of PerplexityTask; "" conversations of the embedded corpus that no run is trained on, and no task asks."""

    name = "validation"
    about = (
        "Perplexity of the replies of fresh conversations, made as the training ones are: what learning rates are chosen by."
    )

    def embedded(self) -> list[dict]:
        """Conversations with a rule, drawn from a seed that training cannot have."""
        drawn = rules.training_set(_SEED, _COUNT)
        return [{"messages": chat["messages"]} for chat in drawn if chat["rule"] != "none"]


def reply_logprob(scored: Scored) -> tuple[float, int]:
    """Summed log-probability and number of the tokens that belong to replies."""
    mask = scored.targets & (np.arange(len(scored.targets)) > 0)
    return float(scored.logprobs[mask].sum(dtype=np.float64)), int(mask.sum())
