"""The grammar of config.data.source, reading its parts, and drawing a mixture."""

import json

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import parts
from calyrex_jax.data.account import Account
from calyrex_jax.data.conversations import as_conversation
from calyrex_jax.data.parts import Part, mix, parse_source


def chat(reply: str | None = "a", **more) -> dict:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": reply}]
    return {"messages": messages, **more}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sources_are_parsed():
    assert parse_source("chats.jsonl") == (Part("jsonl", "chats.jsonl"),)
    assert parse_source(" jsonl:a b.jsonl ") == (Part("jsonl", "a b.jsonl"),)
    assert parse_source("a+b.jsonl") == (Part("jsonl", "a+b.jsonl"),)
    assert parse_source("train.parquet") == (Part("hf", "train.parquet"),)
    assert parse_source("hf:OWNER/NAME@main + tfds:B") == (Part("hf", "OWNER/NAME@main"), Part("tfds", "B"))
    assert parse_source("tfds:A*0.7 + jsonl:B.jsonl * 3") == (Part("tfds", "A", 0.7), Part("jsonl", "B.jsonl", 3.0))
    assert parse_source("rules", size=5, seed=2) == (Part("rules", "", size=5, seed=2),)
    assert [part.name for part in parse_source("rules*1 + x.jsonl*1", size=1)] == ["rules", "jsonl:x.jsonl"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "is empty; expected FILE.jsonl"),
        ("foo:bar", "'foo:bar' is no source"),
        ("rules:3", "'rules:3' is no source"),
        ("tfds:", "'tfds:' is no source"),
        ("a.jsonl + ", "'' is no source"),
        ("a.jsonl*0", "the weight of a.jsonl is 0, expected a positive"),
        ("a.jsonl*nan", "the weight of a.jsonl is nan"),
        ("a.jsonl*x", "the weight of a.jsonl is x"),
        ("tfds:A*2 + tfds:B", "tfds:B has no weight but tfds:A has"),
        ("rules", "config.data.size is 0"),
    ],
)
def test_what_is_not_understood_is_told(text, fault):
    with pytest.raises(UserError, match=fault.replace("*", r"\*")) as error:
        parse_source(text)
    assert "\n" not in str(error.value)


def test_json_lines_are_strict_and_data_sets_are_sifted(tmp_path):
    rows = [chat(), chat(None), {"text": "no turns"}, chat("b"), {"messages": [{"role": "robot", "content": "x"}]}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with pytest.raises(UserError, match=r"x\.jsonl:2: messages\[1\] .*null content"):
        list(parts.read_part(Part("jsonl", str(path)), Account()))
    account = Account()
    found = list(parts.read_part(Part("hf", str(tmp_path)), account))
    assert [(where, row["messages"][-1]["content"]) for where, row in found] == [(f"{path}:1", "a"), (f"{path}:4", "b")]
    assert (account.read, account.kept) == (5, 2)
    assert account.dropped == {
        "with a message that has null content": 1,
        'without "messages" or "conversations"': 1,
        "with a message that has role 'robot'": 1,
    }


def test_parquet_with_messages_and_with_sharegpt_turns(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="the extra parquet")
    import pyarrow.parquet as parquet

    (tmp_path / "data").mkdir()
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    rows = [
        {"conversations": turns, "system": "Shout.", "distill": None},
        {"conversations": turns, "system": " ", "distill": True},
        {"conversations": [{"from": "gpt", "value": "first"}], "system": None, "distill": None},
        {"conversations": None, "system": None, "distill": None},
    ]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "data" / "train-0.parquet")
    parquet.write_table(pa.Table.from_pylist([chat("b")] * 3), tmp_path / "data" / "train-1.parquet")
    parquet.write_table(pa.Table.from_pylist([chat("held out")]), tmp_path / "data" / "test-0.parquet")
    account = Account()
    found = [row for _, row in parts.read_part(Part("hf", str(tmp_path)), account)]
    assert len(found) == 5 and (account.read, account.kept) == (7, 5)
    assert [m["role"] for m in found[0]["messages"]] == ["system", "user", "assistant"]
    assert [row["distill"] for row in found[:2]] == [False, True] and len(found[1]["messages"]) == 2
    assert found[2]["messages"] == chat("b")["messages"]
    assert sum(account.dropped.values()) == 2
    broken = tmp_path / "broken.parquet"
    broken.write_bytes((tmp_path / "data" / "train-1.parquet").read_bytes()[:-40])
    with pytest.raises(UserError, match=r"broken\.parquet: not readable as Parquet") as error:
        list(parts.read_part(Part("hf", str(broken)), Account()))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"messages": {"role": ["user", "assistant"], "content": ["q", "a"]}}, ["user", "assistant"]),
        ({"conversations": [{"role": None, "from": "human", "content": None, "value": "q"}], "messages": None}, ["user"]),
        ({"messages": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "{}"}, {"from": "observation",
          "value": "1"}, {"from": "gpt", "value": "a"}]}, ["user", "assistant", "tool", "assistant"]),
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}], "system": "t"}, ["system", "user"]),
    ],
)  # fmt: skip
def test_turns_of_many_makes(row, roles):
    assert [message["role"] for message in as_conversation(row, "f:1")["messages"]] == roles


@pytest.mark.parametrize("row", [{"messages": "q"}, {"messages": {"role": "user"}}, {"messages": ["q"]}, {"messages": []}])
def test_what_is_no_conversation(row):
    with pytest.raises(UserError, match=r"^f:1: "):
        as_conversation(row, "f:1")


def test_the_fingerprint_is_of_the_content(tmp_path):
    one, other = (write_jsonl(tmp_path / name, [chat()]) for name in ("a.jsonl", "b.jsonl"))
    prints = [parts.fingerprint(Part("jsonl", str(path))) for path in (one, other)]
    assert prints[0] == prints[1]
    write_jsonl(other, [chat("b")])
    assert parts.fingerprint(Part("jsonl", str(other))) != prints[0]
    rules = [parts.fingerprint(Part("rules", "", size=size, seed=seed)) for size, seed in ((5, 0), (5, 0), (6, 0), (5, 1))]
    assert rules[0] == rules[1] and len(set(rules)) == 3
    with pytest.raises(UserError, match="cannot be read"):
        parts.fingerprint(Part("jsonl", str(tmp_path / "absent.jsonl")))


def test_a_mixture_has_the_shares_asked_for_and_repeats_evenly():
    first, second = mix([10, 90], [0.7, 0.3], seed=4)
    assert (len(first), len(second)) == (70, 30)
    assert set(np.bincount(first).tolist()) == {7}  # all ten, seven times each
    assert len(set(second.tolist())) == 30 and second.max() < 90
    uneven = mix([4, 6], [3, 1], seed=0)[0]  # 7.5 of 10 conversations
    assert len(uneven) in (7, 8) and set(np.bincount(uneven, minlength=4).tolist()) <= {1, 2}
    assert sum(map(len, mix([7, 11, 13], [1, 1, 1], seed=0))) == 31
    assert all(len(part) >= 1 for part in mix([1, 1], [1e-9, 1], seed=0))


def test_a_mixture_is_the_seeds():
    draw = [mix([50, 50], [0.9, 0.1], seed)[1].tolist() for seed in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]
