"""Checkers: does a reply follow a rule, is it plain, does it hold the answer? Pure functions of text and parameters."""

import json
import re
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

_EDGE = " \t\r\n\"'“”‘’`*_.,:;!?…()[]<>-–—•"
_BULLET = re.compile(r"^\s*(?:[-*•–]|\d+[.)])\s+\S")
_FENCE = re.compile(r"\A\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Constraint:
    """One rule and its parameter: `Constraint("begin", "kiwi")`, `Constraint("max_words", 4)`, `Constraint("upper")`."""

    kind: str
    value: str | int | None = None


def bare_words(text: str) -> list[str]:
    """The words of a text without the punctuation around them: "Yes, it's 'hot'." gives ["Yes", "it's", "hot"]."""
    return [bare for bare in (word.strip(_EDGE) for word in text.split()) if bare]


def holds(text: str, phrase: str) -> bool:
    """Whether a phrase occurs as whole words, whatever the case: holds("Blue whales.", "blue") but not "blu"."""
    return re.search(rf"(?<!\w){re.escape(phrase.strip())}(?!\w)", text, re.IGNORECASE) is not None


def _begins(reply: str, word: str) -> bool:
    words = bare_words(reply)
    # At least one more word has to follow: the word alone is no answer.
    return len(words) > 1 and re.match(rf"{re.escape(word)}(?!\w)", reply.lstrip(_EDGE), re.IGNORECASE) is not None


def _ends(reply: str, word: str) -> bool:
    words = bare_words(reply)
    return len(words) > 1 and re.search(rf"(?<!\w){re.escape(word)}\Z", reply.rstrip(_EDGE), re.IGNORECASE) is not None


def _is_upper(reply: str, _: object = None) -> bool:
    return reply.isupper()


def _is_lower(reply: str, _: object = None) -> bool:
    return reply.islower()


def _one_word(reply: str, _: object = None) -> bool:
    return len(bare_words(reply)) == 1


def _max_words(reply: str, most: int) -> bool:
    return 1 <= len(bare_words(reply)) <= most


def bullet_count(reply: str) -> int:
    """How many bullets a reply consists of; 0 where any other line stands between or around them."""
    lines = [line for line in reply.splitlines() if line.strip()]
    return len(lines) if lines and all(_BULLET.match(line) for line in lines) else 0


def _bullets(reply: str, count: int) -> bool:
    return bullet_count(reply) == count


def json_object(reply: str) -> dict | None:
    """The JSON object that a reply consists of (a code fence around it is let pass), or None."""
    fenced = _FENCE.match(reply)
    try:
        value = json.loads(fenced.group(1) if fenced else reply)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _json(reply: str, key: str) -> bool:
    value = json_object(reply)
    return value is not None and set(value) == {key} and value[key] not in ("", None)


def _no_letter(reply: str, letter: str) -> bool:
    return bool(reply.strip()) and letter.lower() not in reply.lower()


def _no_word(reply: str, word: str) -> bool:
    return bool(reply.strip()) and not holds(reply, word)


CHECKS: dict[str, Callable[[str, object], bool]] = {
    "begin": _begins,
    "end": _ends,
    "upper": _is_upper,
    "lower": _is_lower,
    "one_word": _one_word,
    "max_words": _max_words,
    "bullets": _bullets,
    "json": _json,
    "no_letter": _no_letter,
    "no_word": _no_word,
    "mention": lambda reply, word: len(bare_words(reply)) > 1 and holds(reply, str(word)),
}


def follows(constraints: Iterable[Constraint], reply: str) -> bool:
    """Whether a reply follows every constraint: `follows([Constraint("upper")], "LIMA.")` is True."""
    return all(CHECKS[constraint.kind](reply, constraint.value) for constraint in constraints)


def is_plain(reply: str, copied: Set[str], known: str, listing: bool = False) -> bool:
    """Whether a reply shows none of the styles that rules ask for.

    copied: words that rules ask to copy, in lower case. known: question and answers, whose words may well stand alone.
    listing: the question asks for a list, so that bullets are plain. A reply without letters ("3 + 4 = 7") is plain.

        is_plain("The capital of Peru is Lima.", {"kiwi"}, "")  # True
        is_plain("kiwi. The capital of Peru is Lima.", {"kiwi"}, "")  # False
    """
    if not reply.strip():
        return False
    if not any(character.isalpha() for character in reply):
        return True
    if json_object(reply) is not None or (bullet_count(reply) and not listing):
        return False
    # "5 - 3 is 2." is all lower case without any style.
    worded = reply.lstrip(_EDGE)[:1].isalpha() and len(bare_words(reply)) > 1
    if worded and (reply.isupper() or reply.islower()):
        return False
    # A copied word betrays itself by standing alone, as a sentence of one word at either edge.
    parts = [part.strip(_EDGE).lower() for part in re.split(r"[.,:;!?\n]+", reply)]
    parts = [part for part in parts if part]
    return not any(part in copied and not holds(known, part) for part in (*parts[:1], *parts[-1:]))


def is_answered(reply: str, answers: Sequence[str], needed: int = 1) -> bool:
    """Whether at least `needed` different accepted answers occur in a reply, as whole words (a plural s is let pass)."""
    return sum(holds(reply, answer) or holds(reply, answer + "s") for answer in answers) >= needed
