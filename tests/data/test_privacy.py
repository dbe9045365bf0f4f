"""The privacy corpus: what is held out, that labels need the prompt, and that every reply is what its label says."""

import itertools
from collections import Counter, defaultdict

import pytest

from calyrex_jax.data import privacy, privacy_text
from calyrex_jax.data.labelled import load_labelled

ITEMS = privacy.evaluation_items()
TRAINING = privacy.training_set(0, 700)


def names(what, split):
    return set(privacy._of(what, split))


def prompt_text(messages):
    return "\n".join(message["content"] for message in messages)


def marks(messages):
    """{value: private?} as the records in the system message say."""
    lines = messages[0]["content"].splitlines()[1:]
    assert len(lines) == 2
    return {line.rpartition(": ")[2]: "(private)" in line for line in lines}


def test_everything_is_a_function_of_the_seed():
    assert privacy.evaluation_items() == ITEMS and privacy.evaluation_items(1) != ITEMS
    assert privacy.training_set(0, 100) == TRAINING[:100] != privacy.training_set(1, 100)
    assert privacy.safe_conversations(3, 50) == privacy.safe_conversations(3, 80)[:50]


def test_the_items_cover_every_family_split_and_field():
    assert 200 <= len(ITEMS) <= 300 and len({item.id for item in ITEMS}) == len(ITEMS)
    cells = Counter((item.split, item.family, item.asked.private, item.asked.field) for item in ITEMS)
    assert min(cells.values()) >= 2
    assert {item.family for item in ITEMS if item.split == "attacks"} == set(privacy_text.HELD_OUT)
    assert {item.family for item in ITEMS} == set(privacy_text.ATTACKS)


def test_names_wordings_and_families_are_held_out():
    for what in ("first", "last"):
        parts = [names(what, split) for split in ("train", "validation", "test")]
        assert min(map(len, parts)) >= 6 and sum(map(len, parts)) == len(set().union(*parts))
    shown = [prompt_text(e.messages) for e in TRAINING] + [
        prompt_text(c["messages"]) for c in privacy.safe_conversations(0, 300) if c["kind"] != "plain"
    ]
    assert not [text for text in shown if any(name in text for name in names("first", "test"))]
    for item in ITEMS:
        assert not any(name in prompt_text(item.messages) for name in names("first", "train"))
    for family, table in privacy_text.ATTACKS.items():
        assert not set(table["train"]) & set(table["test"]) and bool(table["train"]) != (family in privacy_text.HELD_OUT)


def test_items_mark_their_details_and_name_all_private_ones():
    for item in ITEMS:
        found = marks(item.messages)
        assert found[item.asked.value] == item.asked.private
        assert {value for value, private in found.items() if private} == {detail.value for detail in item.private}
        assert (item.public is None) == item.asked.private


def test_the_checkers_on_every_item():
    for item in ITEMS:
        reply = f"Sure, it is {item.asked.value.upper()}."
        assert privacy.discloses(item, reply) == item.asked.private
        assert privacy.tells(item, reply) != item.asked.private
        assert not privacy.discloses(item, "I can't share that.") and not privacy.tells(item, "I can't share that.")
        for detail in item.private:
            assert privacy.discloses(item, f"By the way: {detail.value}")


@pytest.mark.parametrize("examples", [TRAINING, privacy.validation_set(0, 300)])
def test_labels_are_what_the_marks_and_the_reply_say(examples):
    for example in examples:
        private = [value for value, mark in marks(example.messages).items() if mark]
        assert bool(example.label) == any(value in example.response for value in private)


def test_no_reply_can_be_judged_without_its_prompt():
    told = defaultdict(Counter)
    for example in TRAINING:
        told[example.response][example.label] += 1
    both = [counts for counts in told.values() if counts[1]]
    assert all(counts[0] >= counts[1] for counts in both[:-1])  # the last pair may be cut by the size
    share = sum(example.label for example in TRAINING) / len(TRAINING)
    assert 0.4 < share < 0.5
    prompts = defaultdict(set)
    for example in TRAINING:
        prompts[prompt_text(example.messages)].add(example.label)
    assert sum(labels == {0, 1} for labels in prompts.values()) > 60


def test_a_pair_differs_in_one_mark_alone():
    pairs = [(a, b) for a, b in itertools.pairwise(TRAINING) if a.where == b.where and a.label]
    strays = 0
    for first, second in pairs:
        if first.response != second.response:
            continue
        before, after = marks(first.messages), marks(second.messages)
        (changed,) = [value for value in before if before[value] != after[value]]
        assert changed in first.response and (first.label, second.label) == (1, 0)
        assert first.messages[1:] == second.messages[1:]
        asked = first.messages[-1]["content"].lower()
        told = next(line for line in first.messages[0]["content"].splitlines() if changed in line).split("'s")[0].lower()
        strays += told not in asked
    assert len(pairs) > 200 and 0.1 < strays / len(pairs) < 0.25  # replies about the other person


def test_safe_conversations_tell_public_details_and_refuse_private_ones():
    chats = privacy.safe_conversations(0, 400)
    kinds = Counter(chat["kind"] for chat in chats)
    assert min(kinds.values()) > 80 and set(kinds) == {"public", "private", "plain"}
    for chat in chats:
        *prompt, reply = chat["messages"]
        assert reply["role"] == "assistant" and reply["content"].strip()
        found = marks(prompt) if chat["kind"] != "plain" else {}
        assert not any(private and value in reply["content"] for value, private in found.items())
        if chat["kind"] == "public":
            assert any(value in reply["content"] for value in found)
        if chat["kind"] == "private":
            assert "can't" in reply["content"] or "private" in reply["content"]


def test_every_wording_can_be_filled_and_names_what_it_is_about():
    detail = privacy.Detail("Mara Velden", "phone", "555-0142", True)
    for table in privacy_text.ATTACKS.values():
        for wording in (*table["train"], *table["test"]):
            parts = (wording,) if isinstance(wording, str) else wording
            asked = " ".join(privacy.filled(part, detail) for part in parts).lower()
            assert "{" not in asked and "mara velden" in asked and "phone number" in asked and "555" not in asked
            assert len(parts) % 2
    for template in privacy_text.TELLS:
        assert "555-0142" in privacy.filled(template, detail)
    for template in privacy_text.REFUSALS:
        assert "555" not in privacy.filled(template, detail) and "{" not in privacy.filled(template, detail)


def test_the_corpus_as_a_labelled_source():
    examples, report = load_labelled("privacy", seed=0, size=200)
    assert 195 <= len(examples) <= 200 and report.read == 200 and 0 < report.harmful < len(examples)
