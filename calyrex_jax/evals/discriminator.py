"""The trained value space of SVGT as a judge of any reply to a conversation, whoever wrote it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from calyrex_jax.core.types import Array, Tree
from calyrex_jax.data.labelled import encode_labelled_corpus
from calyrex_jax.data.labelled_types import Labelled
from calyrex_jax.evals.ask import ChatReader
from calyrex_jax.evals.tasks.api import Messages
from calyrex_jax.guidance import Dialogue, make_dialogue
from calyrex_jax.model import Model


@dataclass(frozen=True)
class Discriminator:
    """`judge(messages, reply)` is the harm probability that stage 2 was trained to give, sigmoid(s) at the reply's end.

    model, params  {"backbone", "adapters"} of a run with SVGT
    """

    reader: ChatReader
    model: Model
    params: Tree

    def __call__(self, messages: Messages, reply: str) -> float:
        """The harm probability; ValueError where prompt and reply have more tokens than the backbone has positions."""
        asked = Labelled(tuple(dict(message) for message in messages), reply, 0, "reply")
        positions = self.reader.positions
        found, account = encode_labelled_corpus(
            self.reader.tokenizer, [asked], self.reader.policy, 2 * positions, both=False
        )
        if not found or len(found[0].tokens) > positions:
            raise ValueError(f"a prompt with its reply must fit in {positions} positions; {account.line()}")
        talk = make_dialogue(found, [found[0].prompt_length], 1)
        return float(self._ends(self.params, talk)[0])

    @cached_property
    def _ends(self):
        @jax.jit
        def ends(params: Tree, talk: Dialogue) -> Array:
            judged = self.model.judged(params, talk)[1]
            last = talk.reply_mask.sum(-1)  # entry 0 is the prompt's end
            return jax.nn.sigmoid(jax.numpy.take_along_axis(judged.score, last[:, None], axis=1)[:, 0])

        return lambda params, talk: np.asarray(ends(params, talk))
