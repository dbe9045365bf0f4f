"""Ordinary conversation to fill a context with: neutral turns without any rule in them, the same for every model.

Made of the embedded plain chats, and of passages that the user asks about and the assistant tells; long fillings mix the
passages' sentences anew, so that no turn is repeated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from calyrex_jax.data import rules_text
from calyrex_jax.data.rules_questions import read_asset

_ASKS = (
    "Tell me something about this: {p}", "What can you say about it? I only know this much: {p}", "I read this today. {p}",
    "Please continue this description. {p}", "Here is a note from my diary. {p}", "My neighbour told me this. {p}",
    "I am writing a short text. It begins like this: {p}", "Do you like this paragraph? {p}",
)  # fmt: skip
_TELLS = ("Here is a little more. {p}", "That is a nice description. {p}", "It could go on like this. {p}", "{p}")


def exchanges(rng: random.Random) -> Iterator[tuple[str, str]]:
    """(what the user says, what the assistant says), without end: all plain chats in some order, among passages."""
    chats = [(row["user"], row["assistant"]) for row in read_asset("chats.jsonl")]
    rng.shuffle(chats)
    passages = [*rules_text.passages("train"), *rules_text.passages("test")]
    while True:
        if chats and rng.random() < 0.7:
            yield chats.pop()
        else:
            sentences = list(rng.choice(passages))
            rng.shuffle(sentences)
            half = rng.randint(2, len(sentences) - 2)
            asked, told = " ".join(sentences[:half]), " ".join(sentences[half:])
            yield rng.choice(_ASKS).replace("{p}", asked), rng.choice(_TELLS).replace("{p}", told)


def turns(tokens: int, rng: random.Random, length: Callable[..., int]) -> list[dict]:
    """Messages user, assistant, … of at most `tokens` tokens in all, and short of that by less than one turn.

    length  tokens of a conversation, given as its texts: what the user says, what the assistant says, …
    """
    found: list[dict] = []
    # what a template writes around each turn counts; what it writes once does not
    once = 2 * length("", "") - length("", "", "", "")
    left, refused = tokens, 0
    for user, reply in exchanges(rng):
        size = length(user, reply) - once
        if size <= left:
            found += [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]
            left, refused = left - size, 0
        else:
            refused += 1  # a shorter one may still fit
        if refused > 8 or left <= 0:
            return found
    return found


def passage(tokens: int, rng: random.Random, length: Callable[[str], int]) -> str:
    """Running text of at most `tokens` tokens: sentences of all passages, topic after topic."""
    found: list[str] = []
    left = tokens
    while True:
        topics = [*rules_text.passages("train"), *rules_text.passages("test")]
        rng.shuffle(topics)
        for sentence in (sentence for topic in topics for sentence in topic):
            size = length(" " + sentence)
            if size > left:
                return " ".join(found)
            found.append(sentence)
            left -= size
