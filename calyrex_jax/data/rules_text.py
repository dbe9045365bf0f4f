"""Words, phrasings and surroundings of the embedded corpus, drawn from the packaged word lists (assets/)."""

import functools
import random
import re
from collections.abc import Sequence

from calyrex_jax.data.rules_questions import fraction, read_asset

_ALTERNATIVES = re.compile(r"\[([^\[\]]*)\]")
# How a word is shown inside a rule; bare and double-quoted forms are the usual ones.
_QUOTES = ('"{}"', '"{}"', '"{}"', '"{}"', "{}", "{}", "{}", "'{}'", "'{}'", "“{}”", "*{}*", "**{}**", "`{}`", "<{}>")
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_TEST_WORDS = 0.22


def expand(template: str, rng: random.Random) -> str:
    """One reading of a template with alternatives: "[Hi|Hello] there" gives "Hello there"; gaps are closed."""
    text = _ALTERNATIVES.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    text = re.sub(r" +", " ", text)
    return re.sub(r" ([.,:;?!])(?=\s|$)", r"\1", text).strip(" ")


@functools.cache
def words(split: str) -> tuple[str, ...]:
    """The words to copy, of split "train" (about 660) or "test" (about 190); the two share none."""
    everything = [word for row in read_asset("words.jsonl") for word in row["words"].split()]
    return tuple(word for word in everything if (fraction(f"word:{word.lower()}") < _TEST_WORDS) == (split == "test"))


@functools.cache
def all_words() -> frozenset[str]:
    """Every word to copy, in lower case."""
    return frozenset(word.lower() for split in ("train", "test") for word in words(split))


@functools.cache
def phrasings(kind: str, split: str) -> tuple[str, ...]:
    """Templates that state one kind of rule: `phrasings("begin", "test")`."""
    return tuple(row["text"] for row in read_asset("phrasings.jsonl") if (row["rule"], row["split"]) == (kind, split))


@functools.cache
def surroundings(what: str, split: str) -> tuple[str, ...]:
    """Templates of one sort of surrounding text: `surroundings("persona", "train")`."""
    return tuple(row["text"] for row in read_asset("surroundings.jsonl") if (row["what"], row["split"]) == (what, split))


@functools.cache
def passages(split: str) -> tuple[tuple[str, ...], ...]:
    """Neutral passages, each a topic's sentences in order."""
    return tuple(tuple(row["sentences"]) for row in read_asset("passages.jsonl") if row["split"] == split)


def draw(what: str, split: str, rng: random.Random) -> str:
    """One surrounding text of a sort, its alternatives resolved."""
    return expand(rng.choice(surroundings(what, split)), rng)


def draw_word(split: str, rng: random.Random, avoid: str = "") -> str:
    """A word to copy that does not occur in `avoid`; now and then capitalised or in capitals, as people write them."""
    while True:
        word = rng.choice(words(split))
        if word.lower() not in avoid.lower():
            return rng.choice((word,) * 8 + (word.capitalize(), word.capitalize(), word.upper()))


def statement(kind: str, value: str | int | None, split: str, rng: random.Random) -> str:
    """A sentence that states a rule: `statement("begin", "kiwi", "train", rng)` is "Start your reply with 'kiwi'."."""
    text = expand(rng.choice(phrasings(kind, split)), rng)
    if isinstance(value, int):
        return text.replace("{n}", rng.choice((str(value), _NUMBERS[value])))
    if kind == "no_letter":
        letter = rng.choice((str(value), str(value).upper()))
        return text.replace("{x}", rng.choice(('"{}"', "'{}'", "{}")).format(letter))
    return text.replace("{w}", rng.choice(_QUOTES).format(value)) if value is not None else text


def system_text(rules: Sequence[str], split: str, rng: random.Random) -> str:
    """A system prompt with the given rule sentences somewhere in it, alone or among persona and other sentences."""
    rule = rng.choice((" ", " ", "\n", " Also: ", " In addition: ")).join(rules)
    shape = rng.random()
    if shape < 0.45:
        return rule
    persona = draw("persona", split, rng)
    if shape < 0.62:
        return persona + rng.choice((" ", " ", "\n", "\n\n")) + rule
    if shape < 0.72:
        return rule + rng.choice((" ", "\n")) + persona
    fillers = [draw("filler", split, rng) for _ in range(rng.randint(1, 2))]
    if shape < 0.9:
        position = rng.randint(0, len(fillers))
        return rng.choice((" ", "\n")).join([persona, *fillers[:position], rule, *fillers[position:]])
    if shape < 0.97:
        entries = [*fillers, *rules]
        rng.shuffle(entries)
        mark = rng.choice(("- {}", "* {}", "{}", "{n}. {}"))
        listed = [mark.replace("{n}", str(number)).replace("{}", entry) for number, entry in enumerate(entries, 1)]
        return "\n".join([persona, draw("header", split, rng), *listed])
    background = passage(split, rng, 3)
    parts = [persona, rule, background] if rng.random() < 0.5 else [persona, background, rule]
    return "\n\n".join(parts)


def passage(split: str, rng: random.Random, sentences: int) -> str:
    """A neutral passage of about so many sentences, longer ones from several topics."""
    found: list[str] = []
    for topic in rng.sample(passages(split), len(passages(split))):
        found += topic[: max(1, sentences - len(found))]
        if len(found) >= sentences:
            break
    return " ".join(found)


def irrelevant_text(split: str, rng: random.Random) -> str:
    """A system prompt without any rule about the form of replies."""
    text = draw("irrelevant", split, rng)
    for what in ("persona", "filler", "header"):
        while "{" + what + "}" in text:
            text = text.replace("{" + what + "}", draw(what, split, rng), 1)
    return text.replace("{W}", draw_word(split, rng).capitalize())
