"""The embedded corpus: conversations that teach to follow a system prompt's rule, and held-out items that measure it.

    training_set(seed=0, size=4800)    # conversations whose last message follows the rule
    evaluation_set()                   # about 620 items, by cell
    check(item, "kiwi. The capital of Peru is Lima.")  # Verdict(follows=True, answered=True)

Everything is a pure function of the seed and the packaged files. Four things are held out, and each item is in the cell that
says which: every item asks about a fact that no training question touches; unseen_words also have words to copy that never
occur in training; unseen_phrasings state the rule (and its surroundings) in sentences that never do; unseen_rule is the
kind "mention", which training lacks altogether. controls have no rule: the reply must be plain.
"""

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from calyrex_jax.data import rules_replies, rules_text
from calyrex_jax.data.rules_checks import Constraint, follows, is_answered, is_plain
from calyrex_jax.data.rules_questions import Question, frozen_replies, prompt_id, questions, read_asset

# Shares of the training mixture by rule; combinations are joined by "+".
TRAINING_RULES = {
    "begin": 26, "end": 26, "json": 13, "upper": 6, "lower": 6, "one_word": 5, "max_words": 6, "bullets": 6, "no_letter": 4,
    "no_word": 4, "begin+end": 2, "begin+upper": 2, "end+upper": 2, "begin+lower": 2, "end+lower": 2, "one_word+upper": 1,
    "one_word+lower": 1, "bullets+upper": 1,
}  # fmt: skip
CONTROL_SHARE = 0.18
_OPEN_REPEATS = 12
_KEPT_WORDS = 24  # of a control's reply
# What stands between rule and question. drop: the user asks to drop the rule. quote, note: a rule not to be obeyed.
VARIANTS = {"plain": 70, "passage": 6, "turns": 8, "drop": 8, "quote": 5, "note": 3}
_DECOYS = ("begin", "end", "upper", "lower", "json", "one_word", "begin", "end")
_WORD_KINDS = ("begin", "end", "json", "mention")

_WORD_CELL = {"begin": 30, "end": 30, "json": 20}
CELLS = {
    "seen_words": _WORD_CELL,
    "unseen_words": _WORD_CELL,
    "seen_styles": {"upper": 13, "lower": 13, "one_word": 13, "max_words": 13, "bullets": 12, "no_letter": 12, "no_word": 12},
    "combinations": {
        "begin+end": 8, "begin+upper": 8, "end+upper": 8, "begin+lower": 8, "end+lower": 8, "one_word+upper": 6,
        "one_word+lower": 6,
    },
    "unseen_phrasings": {
        "begin": 14, "end": 14, "json": 12, "upper": 12, "lower": 12, "one_word": 10, "max_words": 10, "bullets": 10,
        "no_letter": 8, "no_word": 8,
    },
    "unseen_words_and_phrasings": _WORD_CELL,
    "unseen_rule": {"mention": 50},
    "controls": {"none": 90},
}  # fmt: skip
# Cell -> (split of the words, split of the phrasings and surroundings)
_SPLITS = {
    "seen_words": ("train", "train"), "unseen_words": ("test", "train"), "seen_styles": ("train", "train"),
    "combinations": ("test", "train"),
    "unseen_phrasings": ("train", "test"), "unseen_words_and_phrasings": ("test", "test"),
    "unseen_rule": ("test", "test"), "controls": ("test", "test"),
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """One held-out item: messages that end with the user's question, and what a good reply to them has to be."""

    id: str
    cell: str
    rule: str
    variant: str
    split: str
    messages: tuple[dict, ...]
    constraints: tuple[Constraint, ...]
    question: Question


@dataclass(frozen=True)
class Verdict:
    """Whether a reply follows the rule (a control: is plain), and whether the right answer is in it."""

    follows: bool
    answered: bool


def check(item: Item, reply: str) -> Verdict:
    """Judges one reply to one item; a pure function."""
    question = item.question
    answered = is_answered(reply, question.answers, question.needed)
    if item.constraints:
        return Verdict(follows(item.constraints, reply), answered)
    known = " ".join((question.text, *question.answers))
    return Verdict(is_plain(reply, rules_text.all_words(), known, question.kind == "list"), answered)


def _constraints(rule: str, question: Question, word_split: str, rng: random.Random) -> tuple[Constraint, ...] | None:
    found: list[Constraint] = []
    for kind in rule.split("+"):
        value: str | int | None = None
        if kind in _WORD_KINDS:
            avoid = " ".join((question.text, *question.answers, *(str(other.value) for other in found)))
            value = rules_text.draw_word(word_split, rng, avoid)
        elif kind in ("max_words", "bullets"):
            value = rng.randint(2, 5)
        elif kind in ("no_letter", "no_word"):
            value = rules_replies.forbidden(kind, question, rng)
            if value is None:
                return None
        found.append(Constraint(kind, value))
    return tuple(found)


def _statements(constraints: Sequence[Constraint], split: str, rng: random.Random) -> list[str]:
    found = [rules_text.statement(constraint.kind, constraint.value, split, rng) for constraint in constraints]
    rng.shuffle(found)
    return found


def _decoy(split: str, rng: random.Random) -> str:
    kind = rng.choice(_DECOYS)
    value = rules_text.draw_word(split, rng) if kind in _WORD_KINDS else None
    return rules_text.statement(kind, value, split, rng)


def _user_text(question: Question, variant: str, split: str, rng: random.Random) -> str:
    if variant in ("passage", "note"):
        template = rules_text.draw("passage", split, rng)
        text = rules_text.passage(split, rng, rng.choice((2, 3, 4) if split == "train" else (3, 4, 6, 8, 12, 18)))
        if variant == "note":
            sentences = text.split(". ")
            note = rules_text.draw("note", split, rng).replace("{r}", _decoy(split, rng))
            sentences.insert(rng.randint(0, len(sentences) - 1), note.rstrip("."))
            text = ". ".join(sentences)
        return template.replace("{p}", text).replace("{q}", question.text)
    if variant in ("drop", "quote"):
        text = rules_text.draw(variant, split, rng)
        return text.replace("{r}", _decoy(split, rng)).replace("{q}", question.text)
    return rules_text.draw("ask", split, rng).replace("{q}", question.text)


def _pick(table: dict[str, int], rng: random.Random) -> str:
    return rng.choices(list(table), weights=list(table.values()))[0]


def _system(text: str) -> dict:
    return {"role": "system", "content": text}


def _exchange(user: str, reply: str) -> list[dict]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": reply}]


def _training_rule(pool: Sequence[Question], rng: random.Random) -> dict:
    while True:
        rule = _pick(TRAINING_RULES, rng)
        kinds = rule.split("+")
        asked = rng.choice([question for question in pool if rules_replies.suits(question, kinds)])
        constraints = _constraints(rule, asked, "train", rng)
        reply = rules_replies.obey(constraints, asked) if constraints else None
        if constraints is None or reply is None:
            continue
        variant = _pick(VARIANTS, rng)
        messages = [_system(rules_text.system_text(_statements(constraints, "train", rng), "train", rng))]
        if variant == "turns":
            # Earlier turns follow the rule as well: they are targets too.
            for earlier in rng.sample(pool, rng.randint(1, 2)):
                answered = rules_replies.obey(constraints, earlier) if rules_replies.suits(earlier, kinds) else None
                if answered is not None and earlier != asked:
                    messages += _exchange(_user_text(earlier, "plain", "train", rng), answered)
        messages += _exchange(_user_text(asked, variant, "train", rng), reply)
        return {"messages": messages, "rule": rule, "variant": variant}


def _training_control(rng: random.Random) -> dict:
    """Where no rule is stated, the frozen model's own predictions are to be kept: the conversation is distilled."""
    if rng.random() < 0.75:
        prompt, reply = rng.choice(_answered_controls())
        reply = " ".join(reply.split(" ")[:_KEPT_WORDS])  # no end is learned, so a beginning serves as well
        messages, variant = [*prompt["messages"], {"role": "assistant", "content": reply}], "plain"
    else:
        asked, reply = rng.choice(_answered_questions())
        variant = rng.choice(("plain", "passage", "quote", "note", "quote"))
        messages = [_system(rules_text.irrelevant_text("train", rng))]
        messages += _exchange(_user_text(asked, variant, "train", rng), reply)
    return {"messages": messages, "distill": True, "rule": "none", "variant": variant}


@functools.cache
def control_prompts() -> tuple[dict, ...]:
    """Prompts under irrelevant system texts, to be answered by the frozen model: {"id": …, "messages": […]}."""
    first = [question for question in questions() if question.split == "train" and question.id.endswith("/0")]
    asks = [(question.id, question.text) for question in first]
    for number, template in enumerate(rules_text.surroundings("open", "train")):
        names = [f"open:{number}/{repeat}" for repeat in range(_OPEN_REPEATS)]
        asks += [(name, rules_text.expand(template, random.Random(name))) for name in names]
    found = []
    for name, text in asks:
        system = rules_text.irrelevant_text("train", random.Random(f"control {name}"))
        messages = [_system(system), {"role": "user", "content": text}]
        found.append({"id": prompt_id(f"control:{name}", messages), "messages": messages})
    return tuple(found)


@functools.cache
def _answered_controls() -> tuple[tuple[dict, str], ...]:
    replies = frozen_replies()
    return tuple((prompt, replies[prompt["id"]]) for prompt in control_prompts() if prompt["id"] in replies)


@functools.cache
def _answered_questions() -> tuple[tuple[Question, str], ...]:
    replies = frozen_replies()
    return tuple((question, replies[question.prompt["id"]]) for question in questions() if question.prompt["id"] in replies)


def training_set(seed: int, size: int) -> list[dict]:
    """`size` conversations: {"messages": […], "rule": "begin+upper", "variant": "turns"}; the last message is the reply.

    The i-th conversation depends on seed and i alone, so a larger set begins with the smaller one.
    """
    pool = [question for question in questions() if question.split == "train"]
    pool = [question for question in pool if question.kind == "list" or rules_replies.sentence(question) is not None]
    found = []
    for index in range(size):
        rng = random.Random(f"training {seed} {index}")
        found.append(_training_control(rng) if rng.random() < CONTROL_SHARE else _training_rule(pool, rng))
    return found


def _item(cell: str, rule: str, index: int, pool: Sequence[Question], seed: int) -> Item:
    word_split, split = _SPLITS[cell]
    rng = random.Random(f"evaluation {seed} {cell} {rule} {index}")
    kinds = [] if rule == "none" else rule.split("+")
    fitting = [question for question in pool if rules_replies.suits(question, kinds)]
    constraints: tuple[Constraint, ...] | None = None
    while constraints is None:
        asked = rng.choice(fitting)
        constraints = _constraints(rule, asked, word_split, rng) if kinds else ()
    variant = _pick(VARIANTS, rng)
    messages: list[dict] = []
    if kinds:
        messages.append(_system(rules_text.system_text(_statements(constraints, split, rng), split, rng)))
    else:
        variant = rng.choice(("plain", "plain", "plain", "passage", "quote", "note"))
        if index % 9:
            messages.append(_system(rules_text.irrelevant_text(split, rng)))
    if variant == "turns":
        messages += _exchange("Hello, are you there?", "Hello! Yes, I am here. What would you like to know?")
    messages.append({"role": "user", "content": _user_text(asked, variant, split, rng)})
    return Item(f"{cell}/{rule}/{index}", cell, rule, variant, "test", tuple(messages), constraints, asked)


def evaluation_set(seed: int = 0) -> list[Item]:
    """The held-out items, about 620, in a fixed order; every question is about a fact that training never touches."""
    pool = [question for question in questions() if question.split == "test"]
    rows = [(cell, rule, count) for cell, table in CELLS.items() for rule, count in table.items()]
    return [_item(cell, rule, index, pool, seed) for cell, rule, count in rows for index in range(count)]


def plain_chats() -> list[dict]:
    """Ordinary conversations under irrelevant system texts, to measure how far plain prose is disturbed (perplexity)."""
    found = []
    for number, row in enumerate(read_asset("chats.jsonl")):
        system = rules_text.irrelevant_text("test", random.Random(f"chat {number}"))
        found.append({"messages": [_system(system), *_exchange(row["user"], row["assistant"])]})
    return found
