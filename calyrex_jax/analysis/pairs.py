"""Pairs of conversations that differ in the system prompt's rule alone, made from the embedded corpus.

    pairs = make_pairs(PairSettings(rules=("begin", "end"), count=48), tokenizer, policy)
    pairs[0].plain          # one reply that follows neither rule, under rule A and under rule B
    pairs[0].first          # the reply that follows rule A, under rule A (its own) and under rule B
    pairs[0].second         # the reply that follows rule B, under rule B (its own) and under rule A

Both system texts have as many tokens, and everything else is the same text, so that position t of one conversation is
position t of the other. Facts, phrasings and surroundings are those of the corpus' training split, where a trained adapter
follows rules best and where the frozen model's replies are known; the words to copy are those that training never saw.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import chat, rules_replies, rules_text
from calyrex_jax.data.rules_checks import Constraint, follows
from calyrex_jax.data.rules_questions import Question, questions
from calyrex_jax.data.tokenizer import Tokenizer
from calyrex_jax.evals.tasks import ordinary

WORD_RULES = ("begin", "end", "json")  # rules that name a word
RULES = (*WORD_RULES, "upper", "lower")
_TRIES = 300  # phrasings for one question, until both system texts have as many tokens
_PHRASINGS, _WORDS = "train", "test"


@dataclass(frozen=True)
class Reading:
    """One conversation as the analysis reads it.

    tokens   [T] int32
    system   [T] bool, the system text
    targets  [T] bool, the reply; one run of tokens, with its end-of-turn token
    rule     [T] bool, the part of `system` that states the rule
    word     [T] bool, the part of `rule` that is the word to copy
    strings  the tokens' texts, or empty
    """

    tokens: np.ndarray
    system: np.ndarray
    targets: np.ndarray
    rule: np.ndarray
    word: np.ndarray
    strings: tuple[str, ...] = ()

    @property
    def first_target(self) -> int:
        return int(np.argmax(self.targets))


@dataclass(frozen=True)
class Pair:
    """Two rules, one question; the module's docstring explains plain, first and second.

    fact     what is asked about; the probe's folds hold out whole facts
    systems  the system texts; question and replies likewise as texts, for the report and for longer conversations
    """

    fact: str
    plain: tuple[Reading, Reading]
    first: tuple[Reading, Reading]
    second: tuple[Reading, Reading]
    systems: tuple[str, str] = ("", "")
    question: str = ""
    replies: tuple[str, str] = ("", "")
    marks: tuple[str, str] = ("", "")  # the sentences that state the rules
    words: tuple[str, str] = ("", "")

    def __post_init__(self) -> None:
        for one, other in (self.plain, self.first, self.second):
            if not _aligned(one, other):
                raise ValueError(f"pair {self.fact}: the two conversations differ beyond the system text")


@dataclass(frozen=True)
class PairSettings:
    """rules: two of RULES; the same one twice compares two words under it, fixed for all pairs."""

    rules: tuple[str, str] = ("begin", "end")
    count: int = 48
    seed: int = 0


def parse_rules(text: str) -> tuple[str, str]:
    """config.analyze.rules as a pair: "begin,end"; UserError where it is none."""
    found = tuple(part.strip() for part in text.split(","))
    known = len(found) == 2 and all(rule in RULES for rule in found)
    if not known or (found[0] == found[1] and found[0] not in WORD_RULES):
        raise UserError(
            f"config.analyze.rules is {text!r}; expected two of {', '.join(RULES)}, or one of {', '.join(WORD_RULES)} "
            "twice, such as begin,end or begin,begin"
        )
    return found


def make_pairs(settings: PairSettings, tokenizer: Tokenizer, policy: chat.ChatPolicy) -> list[Pair]:
    """`count` pairs, each about a fact of its own. UserError where the corpus has not so many, or no texts align."""
    kinds = list(dict.fromkeys(settings.rules))
    rng = random.Random(f"analysis {settings.seed} {settings.rules}")
    asked = [q for q in questions() if rules_replies.sentence(q) is not None and q.kind != "list"]
    asked = [q for q in asked if all(rules_replies.suits(q, [kind]) for kind in kinds)]
    rng.shuffle(asked)
    fixed = _two_words(tokenizer, rng) if settings.rules[0] == settings.rules[1] else None
    found: dict[str, Pair] = {}
    for question in asked:
        fact = question.id.rsplit("/", 1)[0]
        if len(found) < settings.count and fact not in found:
            pair = _pair(settings.rules, question, fact, fixed, tokenizer, policy, rng)
            if pair is not None:
                found[fact] = pair
    if len(found) < settings.count:
        raise UserError(
            f"config.analyze.pairs is {settings.count}, but only {len(found)} pairs can be made of the corpus with "
            f"config.analyze.rules={','.join(settings.rules)} and this tokenizer; lower it"
        )
    return list(found.values())


def _two_words(tokenizer: Tokenizer, rng: random.Random) -> tuple[str, str]:
    """Two words of as many tokens, alone, after a blank and in quotation marks."""
    words = list(rules_text.words(_WORDS))
    rng.shuffle(words)
    sizes: dict[tuple, str] = {}
    for word in words:
        size = tuple(len(tokenizer.encode(text)) for text in (word, f" {word}", f'"{word}"'))
        if size in sizes:
            return sizes[size], word
        sizes[size] = word
    raise UserError(f"{tokenizer.name}: no two words of the corpus have as many tokens; choose two different rules")


def _pair(
    rules: tuple[str, str],
    question: Question,
    fact: str,
    fixed: tuple[str, str] | None,
    tokenizer: Tokenizer,
    policy: chat.ChatPolicy,
    rng: random.Random,
) -> Pair | None:
    known = " ".join((question.text, *question.answers))
    word = rules_text.draw_word(_WORDS, rng, known)
    words = (word, word) if fixed is None else fixed
    if any(word.lower() in known.lower() for word in words):
        return None
    made = [Constraint(kind, word if kind in WORD_RULES else None) for kind, word in zip(rules, words)]
    plain, replies = rules_replies.sentence(question), [rules_replies.obey([one], question) for one in made]
    if None in replies or any(follows([one], plain) for one in made):
        return None
    parts = [rules_text.draw("persona", _PHRASINGS, rng), "{rule}", rules_text.draw("filler", _PHRASINGS, rng)]
    parts = rng.choice((parts, [parts[0], parts[2], parts[1]], parts[1:], parts[:2]))
    for _ in range(_TRIES):
        seed = rng.random()  # one seed gives both words of one rule the same sentence
        marks = [rules_text.statement(one.kind, one.value, _PHRASINGS, random.Random(seed)) for one in made]
        systems = [" ".join(parts).replace("{rule}", mark) for mark in marks]
        if len({len(tokenizer.encode(system)) for system in systems}) > 1:
            continue

        def read(which: int, reply: str, systems: Sequence[str] = systems, marks: Sequence[str] = marks) -> Reading:
            messages = _messages(systems[which], question.text, reply)
            return read_conversation(tokenizer, policy, messages, marks[which], made[which].value or "")

        own = [read(0, replies[0]), read(1, replies[1])]
        other = [read(1, replies[0]), read(0, replies[1])]
        both = read(0, plain), read(1, plain)
        if all(_aligned(*two) for two in (both, (own[0], other[0]), (own[1], other[1]))):
            texts = {"systems": tuple(systems), "question": question.text, "replies": tuple(replies), "marks": tuple(marks)}
            return Pair(fact, both, (own[0], other[0]), (own[1], other[1]), **texts, words=words)
    return None


def _messages(system: str, user: str, reply: str) -> list[dict]:
    texts = (("system", system), ("user", user), ("assistant", reply))
    return [{"role": role, "content": text} for role, text in texts]


def _aligned(one: Reading, other: Reading) -> bool:
    same = one.tokens.shape == other.tokens.shape and np.array_equal(one.system, other.system)
    return bool(same and np.array_equal(one.tokens[~one.system], other.tokens[~other.system]))


def read_conversation(
    tokenizer: Tokenizer, policy: chat.ChatPolicy, messages: list[dict], mark: str, word: str = ""
) -> Reading:
    """A conversation whose system text holds the sentence `mark`, which may hold `word`."""
    example = chat.encode(tokenizer, messages, policy=policy)
    ids, span = example.tokens.tolist(), np.flatnonzero(example.system)
    # characters of the decoded system text up to each token: right whatever the template around it
    text = tokenizer.decode([ids[i] for i in span], skip_special=False)
    ends = [len(tokenizer.decode([ids[i] for i in span[: k + 1]], skip_special=False)) for k in range(len(span))]
    ends = np.minimum.accumulate(ends[::-1])[::-1]  # parts of one character decode to several that stand for "none"
    starts = np.minimum(np.concatenate([[0], ends[:-1]]), ends - 1)
    rule, at = np.zeros(len(ids), bool), text.find(mark)
    named, inside = np.zeros(len(ids), bool), mark.find(word) if word else -1
    for slot, start, end in zip(span, starts, ends):
        rule[slot] = at < 0 or (start < at + len(mark) and end > at)
        if at >= 0 and inside >= 0:
            named[slot] = start < at + inside + len(word) and end > at + inside
    strings = tuple(tokenizer.decode([i], skip_special=False) for i in ids)
    return Reading(example.tokens, example.system, example.targets, rule, named, strings)


def at_distance(pair: Pair, tokens: int, tokenizer: Tokenizer, policy: chat.ChatPolicy) -> Reading:
    """Rule A with its own reply, and about so many tokens of neutral text between system prompt and question."""
    rng = random.Random(f"distance {pair.fact}")  # longer fillings begin as the shorter ones do
    text = ordinary.passage(tokens, rng, lambda sentence: len(tokenizer.encode(sentence))) if tokens else ""
    messages = _messages(pair.systems[0], f"{text}\n\n{pair.question}".strip(), pair.replies[0])
    return read_conversation(tokenizer, policy, messages, pair.marks[0], pair.words[0])
