"""Labelled data: every known schema and format, what is dropped and why, splits, and tokens."""

import csv
import gzip
import json

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import chat
from calyrex_jax.data.labelled import (
    encode_labelled_corpus,
    load_labelled,
    split,
)
from calyrex_jax.data.labelled_types import Labelled
from tests.data.conftest import CHATML, GEMMA

POLICY = chat.ChatPolicy()
WILDGUARD = [
    {"prompt": "How do I bake bread?", "adversarial": False, "response": "Mix and wait.", "response_harm_label": "unharmful",
     "response_refusal_label": "compliance", "prompt_harm_label": "unharmful", "subcategory": "benign"},
    {"prompt": "Insult my cousin.", "adversarial": True, "response": "Your cousin is a turnip.", "response_harm_label": "harmful",
     "response_refusal_label": "compliance", "prompt_harm_label": "harmful", "subcategory": "insults"},
    {"prompt": "Only a prompt.", "adversarial": False, "response": None, "response_harm_label": None,
     "response_refusal_label": None, "prompt_harm_label": "harmful", "subcategory": "other"},
    {"prompt": "An unclear one.", "adversarial": False, "response": "Hm.", "response_harm_label": None,
     "response_refusal_label": None, "prompt_harm_label": "harmful", "subcategory": "other"},
    {"prompt": "An empty one.", "adversarial": False, "response": " ", "response_harm_label": "harmful",
     "response_refusal_label": None, "prompt_harm_label": "harmful", "subcategory": "other"},
]  # fmt: skip
BEAVERS = [
    {"prompt": "Is it late?", "response": "It is noon.", "category": {"privacy_violation": False, "violence": False},
     "is_safe": True},
    {"prompt": "Where does he live?", "response": "In the red house.", "category": {"privacy_violation": True, "violence": False},
     "is_safe": False},
]  # fmt: skip


def write_jsonl(path, rows):
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def brief(examples):
    return [(e.messages[-1]["content"] if e.messages else None, e.response, e.label) for e in examples]


def test_wildguardmix_drops_null_labels_and_empty_texts_and_says_so(tmp_path):
    path = write_jsonl(tmp_path / "w.jsonl", WILDGUARD)
    examples, report = load_labelled(f"wildguardmix:{path}")
    assert brief(examples) == [
        ("How do I bake bread?", "Mix and wait.", 0),
        ("Insult my cousin.", "Your cousin is a turnip.", 1),
    ]
    assert examples[1].where == f"{path}:2"
    assert (report.read, report.kept, report.harmful) == (5, 2, 1)
    assert report.dropped == {"without a label": 2, "without a text": 1}
    assert f"dropped 2 without a label ({path}:3, {path}:4)" in report.line()


@pytest.mark.parametrize("schema", ["is_safe", "category"])
def test_both_schemas_of_beavertails(tmp_path, schema):
    rows = [{k: v for k, v in row.items() if k in ("prompt", "response", schema)} for row in BEAVERS]
    examples, _ = load_labelled(f"beavertails:{write_jsonl(tmp_path / 'b.jsonl.gz', rows)}")
    assert brief(examples) == [("Is it late?", "It is noon.", 0), ("Where does he live?", "In the red house.", 1)]


def test_beavertails_with_null_flags(tmp_path):
    rows = [*BEAVERS, {"prompt": "a", "response": "b", "is_safe": None}, {"prompt": "a", "response": "c", "category": None}]
    _, report = load_labelled(f"beavertails:{write_jsonl(tmp_path / 'b.jsonl', rows)}")
    assert report.dropped == {"without a label": 2}


def test_jigsaw(tmp_path):
    names = ["toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate"]
    flags = [(0, 0, 0, 0, 0, 0), (0, 0, 0, 0, 1, 0), (-1, -1, -1, -1, -1, -1)]
    texts = ['A calm "comment",\nof two lines', "You turnip!", "never judged"]
    rows = [{"id": f"x{i}", "comment_text": t, **dict(zip(names, f))} for i, (t, f) in enumerate(zip(texts, flags))]
    path = write_csv(tmp_path / "train.csv", rows)
    examples, report = load_labelled(f"jigsaw:{path}")
    assert brief(examples) == [(None, texts[0], 0), (None, "You turnip!", 1)]
    assert examples[1].where == f"{path}:4"  # the comment before it takes lines 2 and 3
    assert report.dropped == {"without a label": 1}
    shares = [{"comment_text": "fine", "target": 0.49}, {"comment_text": "turnip", "target": "0.5"}]
    assert [e.label for e in load_labelled(f"jigsaw:{write_csv(tmp_path / 'bias.csv', shares)}")[0]] == [0, 1]


def test_toxigen_judged_and_generated(tmp_path):
    judged = [
        {"text": "they are nice", "target_group": "x", "toxicity_ai": 1.0, "toxicity_human": 2.3},
        {"text": "they are turnips", "target_group": "x", "toxicity_ai": 3.0, "toxicity_human": 2.6},
        {"text": "at the edge", "target_group": "x", "toxicity_ai": 3.0, "toxicity_human": 2.5},
    ]
    examples, _ = load_labelled(f"toxigen:{write_csv(tmp_path / 'annotated_train.csv', judged)}")
    assert [e.label for e in examples] == [0, 1, 0]
    write_csv(tmp_path / "annotations.csv", [{"Input.text": "they are nice", "Answer.toxicity": 3}])
    examples, report = load_labelled(f"toxigen:{tmp_path}")
    assert len(examples) == 3 and report.dropped == {"without a label": 1}
    made = [{"prompt": "- a\\n-", "generation": "some text", "prompt_label": n, "group": "x"} for n in (0, 1)]
    made[1]["generation"] = "other text"
    examples, _ = load_labelled(f"toxigen:{write_jsonl(tmp_path / 'toxigen.jsonl', made)}")
    assert brief(examples) == [(None, "some text", 0), (None, "other text", 1)]


def test_own_files_hold_texts_prompts_or_conversations(tmp_path):
    turns = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    rows = [
        {"text": "a text", "label": 0},
        {"prompt": "Hello", "response": "Go away.", "label": True},
        {"messages": turns, "response": "Hello!", "label": "safe"},
    ]
    path = write_jsonl(tmp_path / "own.jsonl", rows)
    for source in (str(path), f"jsonl:{path}"):
        examples, _ = load_labelled(source)
        assert [(len(e.messages), e.label) for e in examples] == [(0, 0), (1, 1), (2, 0)]
        assert examples[2].messages == tuple(turns)


def test_duplicates_are_dropped_across_files_and_the_majority_decides(tmp_path):
    row = {"prompt": "Where?", "response": "In the  RED house.", "is_safe": True}
    write_jsonl(tmp_path / "a.jsonl", [*BEAVERS, *BEAVERS])
    write_jsonl(tmp_path / "b.jsonl", [row, row | {"response": "in the red house."}, row | {"is_safe": False}])
    write_jsonl(tmp_path / "c.jsonl", [row | {"prompt": "A tie", "is_safe": safe} for safe in (True, False)])
    examples, report = load_labelled(f"beavertails:{tmp_path}")
    assert len(examples) == 3 and examples[2].label == 0
    assert report.dropped == {"duplicates": 3, "outvoted by their duplicates": 1, "with contradicting labels": 2}
    assert report.read == report.kept + report.dropped.total() == 9


def test_a_directory_without_its_held_out_files(tmp_path):
    (tmp_path / "round0").mkdir()
    write_jsonl(tmp_path / "round0" / "train.jsonl.gz", BEAVERS)
    (tmp_path / "round0" / "more.json").write_text(json.dumps([BEAVERS[0] | {"response": "Nearly one."}]))
    write_jsonl(tmp_path / "round0" / "test.jsonl", [BEAVERS[0] | {"response": "held out"}])
    (tmp_path / "README.md").write_text("no data")
    examples, report = load_labelled(f"beavertails:{tmp_path}")
    assert [e.response for e in examples] == ["Nearly one.", "It is noon.", "In the red house."]
    assert report.left_out == ["round0/test.jsonl"] and "left out round0/test.jsonl" in report.line()
    (tmp_path / "round0" / "train.jsonl.gz").unlink()
    (tmp_path / "round0" / "more.json").unlink()
    with pytest.raises(UserError, match=r"no data files but held-out ones \(round0/test.jsonl\); name one of them"):
        load_labelled(f"beavertails:{tmp_path}")


def test_parquet(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow comes with the extras parquet and eval")
    table = __import__("pyarrow").Table.from_pylist(WILDGUARD)
    parquet.write_table(table, tmp_path / "wildguard_train.parquet")
    examples, report = load_labelled(f"wildguardmix:{tmp_path}")
    assert [e.label for e in examples] == [0, 1] and report.dropped.total() == 3
    (tmp_path / "wildguard_train.parquet").write_bytes(b"PAR1 but no more")
    with pytest.raises(UserError, match="not readable as Parquet"):
        load_labelled(f"wildguardmix:{tmp_path}")


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"Parquet needs pyarrow, .*pip install .*to_json"):
        load_labelled(f"wildguardmix:{tmp_path}")


@pytest.mark.parametrize(
    ("source", "lines", "fault"),
    [
        ("{f}", ['{"text": "a", "label": 1}', '{"text": "b", "label": 1}'], "every label is 1, both labels are needed"),
        ("{f}", ['{"text": "a", "label": null}'], "no example is left.*dropped 1 without a label"),
        ("{f}", ['{"text": "a", "label": 0}', '{"text": "b", "label": 2}'], r"f.jsonl:2: \"label\" is '2', expected 1 or 0"),
        ("{f}", ['{"text": 7, "label": 0}'], 'f.jsonl:1: "text" is \'7\', expected a text'),
        ("{f}", ['{"text": "a"}'], 'f.jsonl:1: no "label", only text'),
        ("{f}", ['{"text": "a", "label": 0}', "{"], "f.jsonl:2: malformed JSON"),
        ("{f}", ['{"messages": [{"role": "assistant", "content": "x"}], "response": "y", "label": 0}'], "f.jsonl:1: messages"),
        ("wildguardmix:{f}", ['{"prompt": "a", "response": "b"}'], 'f.jsonl:1: no "response_harm_label"'),
        ("beavertails:{f}", ['{"prompt": "a", "response": "b", "category": 3}'], '"category" is \'3\', expected an object'),
        ("beavertails:{f}", ['{"prompt": "a", "response": "b"}'], 'f.jsonl:1: no "is_safe or category"'),
        ("toxigen:{f}", ['{"text": "a", "toxicity_ai": "high", "toxicity_human": 1}'], "'high', expected a number"),
        ("beavertails:{f}.nothing", ["{}"], "is no file and no directory"),
        ("unknown:{f}.txt", ["{}"], "is not understood; expected FILE.jsonl, jsonl:PATH, wildguardmix:PATH"),
        ("beavertails:hf:nonsense", ["{}"], "expected hf:OWNER/NAME"),
    ],
)  # fmt: skip
def test_faults_name_their_line(tmp_path, source, lines, fault):
    path = tmp_path / "f.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=fault):
        load_labelled(source.replace("{f}", str(path)))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("comment_text,target\nfine,0.1,more\n", "t.csv:2: not as many fields"),
        ("comment_text,target\nfine,0.1\nfine\n", "t.csv:3: not as many fields"),
        ('comment_text,target\n"fine"x,0.1\n', "t.csv:2: malformed csv"),
    ],
)
def test_faulty_csv(tmp_path, text, fault):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=fault):
        load_labelled(f"jigsaw:{tmp_path / 't.csv'}")


def test_an_unreachable_hub_is_one_line_with_a_remedy():
    with pytest.raises(UserError, match=r"hf:nobody/nothing-at-all cannot be fetched .* give the directory"):
        load_labelled("beavertails:hf:nobody/nothing-at-all")


def numbered(harmful, safe):
    labels = [1] * harmful + [0] * safe
    return [Labelled((), f"text {index}", label, f"f:{index}") for index, label in enumerate(labels)]


def test_splits_are_stratified_seeded_and_disjoint():
    examples = numbered(30, 70)
    train, validation = split(examples, seed=3, fractions=(0.8, 0.2))
    assert [sum(e.label == label for e in part) for part in (train, validation) for label in (1, 0)] == [24, 56, 6, 14]
    assert {e.response for e in train} | {e.response for e in validation} == {e.response for e in examples}
    assert split(examples, 3, (0.8, 0.2)) == (train, validation)
    assert split(list(reversed(examples)), 3, (0.8, 0.2))[1] == list(reversed(validation))
    assert split(examples, 4, (0.8, 0.2))[1] != validation


def test_no_text_is_on_both_sides():
    asked = [({"role": "user", "content": f"question {n}"},) for n in range(40)]
    examples = [Labelled(m, f"Reply {n % 20}", n // 20, f"f:{n}") for n, m in enumerate(asked)]
    examples += [Labelled(m, "I can't.", 0, "f") for m in asked]
    train, validation = split(examples, 0, (0.75, 0.25))
    assert not {e.response for e in train} & {e.response for e in validation}
    assert {e.label for e in validation} == {0, 1} and len(train) + len(validation) == 80


def test_a_split_without_one_label_is_refused():
    with pytest.raises(UserError, match=r"1 harmful\) are too few: the validation part"):
        split(numbered(1, 30), 0)


# Tokens


def encoded_alone(tokenizer, example):
    [[encoded], _] = encode_labelled_corpus(tokenizer, [example], POLICY, 512, both=False)
    return encoded


def test_prompt_and_reply_are_the_chat_templates(tiny):
    tokenizer = tiny(CHATML)
    messages = (
        {"role": "system", "content": "answer in one word"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello, world!"},
        {"role": "user", "content": "the quick brown fox"},
    )
    encoded = encoded_alone(tokenizer, Labelled(messages, "jumps over", 1, "f:1"))
    prompt = chat.encode(tokenizer, list(messages), for_generation=True)
    assert encoded.tokens.dtype == np.int32 and encoded.system.dtype == bool and encoded.label == 1
    assert encoded.tokens[: encoded.prompt_length].tolist() == prompt.tokens.tolist()
    assert encoded.system[: encoded.prompt_length].tolist() == prompt.system.tolist()
    assert not encoded.system[encoded.prompt_length :].any()
    reply = encoded.tokens[encoded.prompt_length :]
    assert tokenizer.decode(reply, skip_special=False) == "jumps over<|im_end|>"


def test_a_text_alone_has_no_prompt(tiny):
    tokenizer = tiny(CHATML)
    encoded = encoded_alone(tokenizer, Labelled((), "the quick brown fox", 0, "f:1"))
    assert encoded.prompt_length == 0 and not encoded.system.any()
    assert encoded.tokens.tolist() == tokenizer.encode("the quick brown fox")


def test_a_template_that_trims_and_renames(tiny):
    tokenizer = tiny(GEMMA)
    example = Labelled(({"role": "user", "content": "Hi "},), "the fox\n", 0, "f:1")
    encoded = encoded_alone(tokenizer, example)
    assert tokenizer.decode(encoded.tokens[encoded.prompt_length :], skip_special=False) == "the fox<end_of_turn>"


def test_what_is_too_long_is_dropped_and_counted_never_cut(tiny):
    tokenizer = tiny(CHATML)
    short, long = "Hello", "Hello " * 60
    ask = lambda text: ({"role": "user", "content": text},)  # noqa: E731
    examples = [
        Labelled(ask(short), short, 1, "f:1"),
        Labelled((), short, 0, "f:2"),
        Labelled(ask(long), short, 1, "f:3"),
        Labelled(ask(short), long, 1, "f:4"),
        Labelled((), long, 0, "f:5"),
    ]
    rows, account = encode_labelled_corpus(tokenizer, examples, POLICY, 60)
    assert [(row.label, row.prompt_length > 0) for row in rows] == [(1, True), (0, False)]
    assert account.places == {"with a prompt of more than 30 tokens": ["f:3"], "of more than 60 tokens": ["f:4", "f:5"]}
    with pytest.raises(UserError, match=r"both labels are needed, but kept 1 of 2 .*raise the greatest length \(60\)"):
        encode_labelled_corpus(tokenizer, [examples[0], examples[4]], POLICY, 60)
