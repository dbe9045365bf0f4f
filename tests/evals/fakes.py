"""A reader and a model under test that need neither tokenizer nor weights: a token is a word."""

from dataclasses import dataclass, field

from calyrex_jax.evals.tasks.api import Answer


@dataclass(frozen=True)
class WordReader:
    """Counts words, three more for every turn's markers and one for the opening of a reply."""

    positions: int = 8192

    def length(self, messages, *, for_generation=True, where=""):
        return sum(len(m["content"].split()) + 3 for m in messages) + for_generation


@dataclass
class Says:
    """An Ask whose reply to a conversation is `reply(messages)`; remembers what it was asked, and answers backwards."""

    reply: object
    batch_size: int = 4
    asked: list = field(default_factory=list)

    def generate(self, conversations, max_new_tokens):
        conversations = [list(messages) for messages in conversations]
        self.asked += conversations
        for index in reversed(range(len(conversations))):
            yield index, Answer(self.reply(conversations[index]), "stop")


def scores_of(verdict):
    """{cell: (total, count)}"""
    return {score.cell: (score.total, score.count) for score in verdict.scores}
