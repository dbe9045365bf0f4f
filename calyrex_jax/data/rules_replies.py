"""Replies that follow a rule, made from the frozen model's own reply to the bare question."""

import functools
import json
import random
import re
from collections.abc import Sequence

from calyrex_jax.data.rules_checks import Constraint, follows, holds, is_answered
from calyrex_jax.data.rules_questions import Question, frozen_replies, held_out_replies

_LONGEST_SENTENCE = 16  # words; a longer sentence makes a poor pattern
_NUMERIC = ("sum", "legs")
_CONTENT = re.compile(r"[A-Za-z]{3,}")


@functools.cache
def sentence(question: Question) -> str | None:
    """The first sentence of the frozen model's reply, if it holds the answer in moderate length; else None.

    sentence(capital_of_peru)  # "The capital of Peru is Lima."
    """
    return _first(frozen_replies().get(question.prompt["id"]), question)


@functools.cache
def held_out_sentence(question: Question) -> str | None:
    """The same of a held-out question, for which training has no reply: what a model says that heeds no rule."""
    return _first(held_out_replies().get(question.prompt["id"]), question)


def _first(reply: str | None, question: Question) -> str | None:
    if reply is None:
        return None
    first = re.split(r"(?<=[.!?])\s", reply.strip(), maxsplit=1)[0]
    short = "\n" not in first and len(first.split()) <= _LONGEST_SENTENCE
    return first if short and first[-1] in ".!?" and is_answered(first, question.answers, question.needed) else None


@functools.cache
def answer(question: Question) -> str:
    """The answer in the form in which the frozen model gives it, else the first accepted one: "Lima"."""
    reply = sentence(question) or ""
    for accepted in question.answers:
        if holds(reply, accepted):
            found = re.search(rf"(?<!\w){re.escape(accepted)}", reply, re.IGNORECASE)
            return found.group(0) if found else accepted
    return question.answers[0]


def suits(question: Question, kinds: Sequence[str]) -> bool:
    """Whether rules of these kinds make sense for a question: bullets need lists, letter case needs letters."""
    if "bullets" in kinds:
        return question.kind == "list"
    if {"one_word", "max_words", "no_letter", "no_word"} & set(kinds) and question.kind == "list":
        return False
    if "one_word" in kinds and all(" " in accepted for accepted in question.answers):
        return False
    return not ({"upper", "lower"} & set(kinds) and question.kind in _NUMERIC)


def forbidden(kind: str, question: Question, rng: random.Random) -> str | None:
    """A letter or word that one would like to use in a reply to a question, though the answer itself lacks it."""
    base = sentence(question) or question.text
    known = " ".join(question.answers).lower()
    if kind == "no_letter":
        # Each occurrence counts, so that common letters, which are hard to avoid, are drawn more often.
        choice = [letter for letter in base.lower() if "a" <= letter <= "z" and letter not in known]
    else:
        choice = sorted({word.lower() for word in _CONTENT.findall(base) if not holds(known, word)} - {"what", "which"})
    return rng.choice(choice) if choice else None


def _styled(constraints: Sequence[Constraint], question: Question, base: str) -> str:
    by_kind = {constraint.kind: constraint.value for constraint in constraints}
    short = answer(question)
    short = short[0].upper() + short[1:]
    text = base
    if "bullets" in by_kind:
        named = sorted(question.answers, key=lambda member: not holds(base, member))
        text = "\n".join(f"- {member[0].upper()}{member[1:]}" for member in named[: int(by_kind["bullets"])])
    elif "one_word" in by_kind:
        single = [short, *(accepted for accepted in question.answers if " " not in accepted)]
        text = next(f"{word[0].upper()}{word[1:]}." for word in single if " " not in word)
    elif {"max_words", "no_letter", "no_word"} & set(by_kind):
        rest = [constraint for constraint in constraints if constraint.kind in ("max_words", "no_letter", "no_word")]
        text = next((text for text in (base, f"It is {answer(question)}.", f"{short}.") if follows(rest, text)), "")
    if "begin" in by_kind:
        text = f"{by_kind['begin']}. {text}"
    if "end" in by_kind:
        text = f"{text} {by_kind['end']}"
    if "json" in by_kind:
        text = json.dumps({str(by_kind["json"]): text}, ensure_ascii=False)
    return text


def obey(constraints: Sequence[Constraint], question: Question, base: str | None = None) -> str | None:
    """The reply that follows the constraints and answers the question, or None where there is no such reply.

    It is made of `base`, by default `sentence(question)`.

    obey([Constraint("begin", "kiwi"), Constraint("upper")], capital_of_peru)  # "KIWI. THE CAPITAL OF PERU IS LIMA."
    """
    base = sentence(question) if base is None else base
    if base is None:
        # Bullets are made from the list itself, so the frozen model's own sentence is not needed for them.
        if not any(constraint.kind == "bullets" for constraint in constraints):
            return None
        base = ""
    text = _styled(constraints, question, base)
    kinds = {constraint.kind for constraint in constraints}
    if "upper" in kinds:
        text = text.upper()
    elif "lower" in kinds:
        text = text.lower()
    return text if text and follows(constraints, text) else None
