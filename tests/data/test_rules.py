"""The embedded corpus: deterministic, obedient, and with real held-out splits."""

import collections
import json

import pytest

from calyrex_jax.data import rules, rules_replies, rules_text
from calyrex_jax.data.rules_checks import Constraint, follows, is_answered, is_plain
from calyrex_jax.data.rules_questions import ASSETS, frozen_replies, questions


@pytest.fixture(scope="module")
def training():
    return rules.training_set(seed=3, size=1500)


@pytest.fixture(scope="module")
def items():
    return rules.evaluation_set()


def test_training_set_depends_on_seed_and_index_alone(training):
    assert rules.training_set(seed=3, size=40) == training[:40]
    assert rules.training_set(seed=4, size=40) != training[:40]


def test_conversations_are_well_formed(training):
    for row in training:
        roles = [message["role"] for message in row["messages"]]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2) and turns
        assert all(message["content"].strip() and "{" + "q}" not in message["content"] for message in row["messages"])
        assert roles[0] == "system" or row["rule"] == "none"


def test_no_template_mark_is_left(training, items):
    texts = [message["content"] for row in training for message in row["messages"] if message["role"] != "assistant"]
    texts += [message["content"] for item in items for message in item.messages]
    marks = ("{w}", "{n}", "{x}", "{q}", "{p}", "{r}", "{W}", "{persona}", "{filler}", "{header}", "[", "]", "|")
    assert not [text for text in texts if any(mark in text for mark in marks)]


def test_mixture(training):
    variants = collections.Counter(row["variant"] for row in training)
    assert set(variants) == set(rules.VARIANTS)
    counted = collections.Counter(row["rule"] for row in training)
    assert set(counted) == {*rules.TRAINING_RULES, "none"}
    assert 0.15 < counted["none"] / len(training) < 0.25
    assert not any("mention" in rule for rule in counted)


def test_replies_obey_and_answer():
    pool = [question for question in questions() if question.split == "train" and rules_replies.sentence(question)]
    made = 0
    for number, question in enumerate(pool):
        for constraints in (
            [Constraint("begin", "zorb")],
            [Constraint("end", "zorb"), Constraint("upper")],
            [Constraint("json", "zorb")],
            [Constraint("max_words", 2 + number % 4)],
            [Constraint("one_word"), Constraint("lower")],
        ):
            if not rules_replies.suits(question, [constraint.kind for constraint in constraints]):
                continue
            reply = rules_replies.obey(constraints, question)
            if reply is None:
                assert constraints[0].kind in ("max_words", "one_word", "json")
                continue
            made += 1
            assert follows(constraints, reply)
            text = " ".join(map(str, json.loads(reply).values())) if constraints[0].kind == "json" else reply
            assert is_answered(text, question.answers, question.needed), (question.text, reply)
    assert made > 4 * len(pool) * 0.8


def test_bullets_come_from_the_list():
    question = next(question for question in questions() if question.id == "list:planets/0")
    reply = rules_replies.obey([Constraint("bullets", 3), Constraint("upper")], question)
    assert reply is not None and len(reply.splitlines()) == 3 and "- MERCURY" in reply


def test_words_are_many_and_disjoint():
    train, test = set(rules_text.words("train")), set(rules_text.words("test"))
    assert len(train) >= 400 and len(test) >= 100
    assert not {word.lower() for word in train} & {word.lower() for word in test}


def test_phrasings_are_many_and_disjoint():
    for kind in ("begin", "end", "upper", "lower", "one_word", "max_words", "bullets", "json", "no_letter", "no_word"):
        train, test = rules_text.phrasings(kind, "train"), rules_text.phrasings(kind, "test")
        assert len(train) >= 35 and len(test) >= 8 and not set(train) & set(test)
    assert not rules_text.phrasings("mention", "train") and len(rules_text.phrasings("mention", "test")) >= 8


def test_held_out_facts_never_occur_in_training(training):
    held_out = {question.text for question in questions() if question.split == "test"}
    kept = {question.text for question in questions() if question.split == "train"}
    assert not held_out & kept and len(held_out) > 250
    users = [message["content"] for row in training for message in row["messages"] if message["role"] == "user"]
    assert not [text for text in users if any(question in text for question in held_out)]


def test_held_out_words_are_never_asked_for_in_training(training):
    # Invented words occur nowhere but as words to copy, so that any trace of a held-out one would show.
    invented = set(json.loads((ASSETS / "words.jsonl").read_text().splitlines()[-1])["words"].split())
    texts = " ".join(message["content"] for row in training for message in row["messages"]).lower()
    assert not [word for word in invented & set(rules_text.words("test")) if word in texts]
    assert len([word for word in invented & set(rules_text.words("train")) if word in texts]) > 50


def test_evaluation_set(items):
    assert 580 <= len(items) <= 660 and items == rules.evaluation_set()
    assert len({item.id for item in items}) == len(items)
    cells = collections.Counter(item.cell for item in items)
    assert set(cells) == set(rules.CELLS) and min(cells.values()) >= 50
    for item in items:
        assert item.question.split == "test" and item.messages[-1]["role"] == "user"
        assert item.question.text in item.messages[-1]["content"]
        assert bool(item.constraints) == (item.cell != "controls")
    for cell, split in (("seen_words", "train"), ("unseen_words", "test"), ("unseen_words_and_phrasings", "test")):
        values = [
            constraint.value for item in items if item.cell == cell for constraint in item.constraints if constraint.value
        ]
        known = {word.lower() for word in rules_text.words(split)}
        assert values and all(str(value).lower() in known for value in values)
    assert {item.rule for item in items if item.cell == "unseen_rule"} == {"mention"}


def test_check(items):
    item = next(item for item in items if item.id == "seen_words/begin/0")
    word, answer = item.constraints[0].value, item.question.answers[0]
    assert rules.check(item, f"{word}. It is {answer}.") == rules.Verdict(True, True)
    assert rules.check(item, f"It is {answer}.") == rules.Verdict(False, True)
    assert rules.check(item, f"{word}. I do not know.") == rules.Verdict(True, False)
    control = next(item for item in items if item.cell == "controls")
    assert rules.check(control, "It is plain.").follows and not rules.check(control, "IT IS LOUD.").follows


def test_frozen_replies_are_right_and_fit():
    assert (ASSETS / "answers.jsonl").stat().st_size < 1_000_000
    replies = frozen_replies()
    right = [question for question in questions() if question.prompt["id"] in replies]
    assert len(right) >= 600
    for question in right:
        assert question.split == "train" and is_answered(replies[question.prompt["id"]], question.answers, question.needed)


def test_plain_replies_of_the_frozen_model_count_as_plain():
    asked = [question for question in questions() if question.prompt["id"] in frozen_replies()]
    plain = 0
    for question in asked:
        known = " ".join((question.text, *question.answers))
        plain += is_plain(frozen_replies()[question.prompt["id"]], rules_text.all_words(), known, question.kind == "list")
    assert plain >= 0.99 * len(asked)


def test_plain_chats():
    chats = rules.plain_chats()
    assert len(chats) >= 50 and chats == rules.plain_chats()
    assert all([message["role"] for message in row["messages"]] == ["system", "user", "assistant"] for row in chats)
