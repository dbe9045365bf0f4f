"""A corpus on disk: encoded once, the same examples as in memory, mixed by weight, and honest about what it drops."""

import json

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import corpus, records
from calyrex_jax.data.account import Account
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.parts import parse_source
from calyrex_jax.data.pipeline import Batches, fingerprint
from calyrex_jax.data.sources import load_conversations
from calyrex_jax.data.token_store import TokenStore
from tests.data.conftest import CHATML
from tests.data.in_memory import encode_corpus


def chat(question: str, reply: str, system: str | None = None, **more) -> dict:
    messages = [{"role": "system", "content": system}] if system else []
    return {"messages": [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": reply}], **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def chats(tmp_path):
    rows = [chat(f"question {i}", "yes " * (1 + i % 7), "Shout." if i % 3 else None, distill=i % 4 == 0) for i in range(40)]
    rows[5] = chat("too long", "no " * 300)
    rows[6] = chat("silent", " ")
    rows[7] = chat("q <|im_end|>", "b", "r")
    return write(tmp_path / "chats.jsonl", rows)


@pytest.fixture
def load(tiny, tmp_path):
    tokenizer = tiny(CHATML)

    def run(source: str, max_length: int = 128, policy: ChatPolicy | None = None, **more):
        where = tmp_path / "tokens"
        return corpus.load_corpus(tokenizer, policy or ChatPolicy(), parse_source(source), max_length, where, **more)

    run.tokenizer = tokenizer
    return run


def assert_same(examples, others):
    assert len(examples) == len(others)
    for a, b in zip(examples, others):
        for name in ("tokens", "system", "targets"):
            x, y = getattr(a, name), getattr(b, name)
            np.testing.assert_array_equal(x, y)
            assert x.dtype == y.dtype
        assert (a.origin, a.shielded, a.distill) == (b.origin, b.shielded, b.distill)


def test_from_disk_as_in_memory(chats, load, tmp_path, monkeypatch):
    examples, report = load(str(chats))
    expected, account = encode_corpus(load.tokenizer, load_conversations(chats), 128)
    assert_same(examples, expected)
    assert report == account and report.kept == 38
    assert (examples.lengths == [len(e.tokens) for e in expected]).all()
    assert fingerprint(examples) == fingerprint(expected)
    monkeypatch.setattr(corpus, "encode_stream", None)  # nothing is encoded a second time
    again, told = load(str(chats))
    assert_same(again, expected)
    [store] = again._stores
    assert store.targets.tolist() == [int(example.targets.sum()) for example in store]
    assert told == account
    assert load(str(chats), max_length=30)[1].kept < 38  # nor for another length
    assert [path.name[0] != "." for path in (tmp_path / "tokens").iterdir()] == [True]


def test_a_prepared_corpus_gives_the_same_examples(chats, load, tmp_path):
    rows = load_conversations(chats)
    records.write_records(rows, tmp_path / "corpus")
    examples, report = load(f"tfds:{tmp_path / 'corpus'}")
    expected, account = encode_corpus(load.tokenizer, rows, 128)
    assert_same(examples, expected)
    assert report == account and report.places["too long"] == [f"{chats}:6"]


def test_another_content_or_policy_is_encoded_anew(chats, load, tmp_path):
    load(str(chats))
    load(str(chats), policy=ChatPolicy(date_string="1 May 2025"))
    write(chats, [chat("q", "a")])
    assert load(str(chats))[1].read == 1
    assert len(list((tmp_path / "tokens").iterdir())) == 3


@pytest.mark.parametrize("damage", ["tokens", "marks", "meta.json"])
def test_a_damaged_store_is_made_again(chats, load, tmp_path, damage):
    expected = encode_corpus(load.tokenizer, load_conversations(chats), 128)[0]
    load(str(chats))
    [store] = (tmp_path / "tokens").iterdir()
    file = store / damage
    file.write_bytes(file.read_bytes()[:-7] + b"\0" * 7)
    assert_same(load(str(chats))[0], expected)


def test_a_fault_leaves_nothing_behind(chats, load, tmp_path):
    with chats.open("a") as file:
        file.write('{"messages": [{"role": "user", "content": null}]}\n')
    with pytest.raises(UserError, match=r"chats\.jsonl:41: messages\[0\]"):
        load(str(chats))
    assert not (tmp_path / "tokens").exists()


def test_a_disk_that_cannot_be_written(chats, load, tmp_path):
    (tmp_path / "tokens").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written .*config\.data\.token_dir"):
        load(str(chats))


def test_weights_draw_from_the_stores(chats, load, tmp_path):
    few = write(tmp_path / "few.jsonl", [chat(f"other {i}", "no") for i in range(10)])
    source = f"jsonl:{chats}*0.25 + jsonl:{few}*0.75"
    examples, report = load(source, seed=3)
    assert (report.read, report.kept, len(examples)) == (50, 48, 48)
    assert report.drawn == [f"12 of jsonl:{chats} (38)", f"36 of jsonl:{few} (10)"]
    assert "an epoch draws 12 of" in report.line()
    assert report.dropped == {"too long": 1, "without a reply to learn": 1}
    assert fingerprint(load(source, seed=3)[0]) == fingerprint(examples) != fingerprint(load(source, seed=4)[0])
    both, plain = load(f"jsonl:{chats} + jsonl:{few}")
    assert len(both) == 48 and plain.drawn == []
    assert len(list((tmp_path / "tokens").iterdir())) == 2  # weights encode nothing anew


def test_nothing_left(load, tmp_path):
    silent, good = write(tmp_path / "silent.jsonl", [chat("q", " ")]), write(tmp_path / "good.jsonl", [chat("q", "a")])
    with pytest.raises(UserError, match=r"no conversation is left to train on: kept 0 of 1 .*silent\.jsonl:1"):
        load(str(silent))
    with pytest.raises(UserError, match=r"no conversation of jsonl:.*silent\.jsonl is left"):
        load(f"{silent}*1 + {good}*1")
    assert load(f"{silent} + {good}")[1].kept == 1
    empty = tmp_path / "hub"
    empty.mkdir()
    write(empty / "train.jsonl", [{"text": "x"}, {"text": "y"}])
    with pytest.raises(UserError, match=r"kept 0 of 2 conversations; dropped 2 without \"messages\""):
        load(f"hf:{empty}")


def test_absent_parts_are_told_before_anything_is_encoded(chats, load, tmp_path):
    for absent in ("jsonl:nope.jsonl", "tfds:nope", "nope.parquet"):
        with pytest.raises(UserError, match="nope"):
            load(f"jsonl:{chats} + {absent}")
    assert not (tmp_path / "tokens").exists()


def test_progress_and_hosts_and_resume(load, tmp_path):
    many = write(tmp_path / "many.jsonl", [chat(f"q {i}", "a " * (i % 9 + 1)) for i in range(1100)])
    heard = []
    examples, _ = load(str(many), advance=heard.append)
    assert heard == [512, 512]
    settings = {"batch_size": 4, "max_length": 128, "packing": True, "seed": 1}
    whole = Batches(examples, **settings)
    hosts = [Batches(examples, **settings, process_index=i, process_count=2) for i in range(2)]
    for _ in range(3):
        batch, info = next(whole)
        rows = [next(host) for host in hosts]
        assert {(r[1].step, r[1].tokens) for r in rows} == {(info.step, info.tokens)}
        np.testing.assert_array_equal(np.stack([r[0].tokens for r in rows], 1).reshape(batch.tokens.shape), batch.tokens)
    again = Batches(load(str(many))[0], **settings)
    again.set_state(json.loads(json.dumps(whole.get_state())))
    np.testing.assert_array_equal(next(again)[0].tokens, next(whole)[0].tokens)
    for batches in (whole, again, *hosts):
        batches.close()


def test_a_store_without_examples(tmp_path):
    account = Account(read=2)
    account.drop("bad", "f:1")
    store = TokenStore.write(tmp_path / "s" / "x", {"a": 1}, [], account)
    assert len(store) == 0 and store.account == account and store.targets.shape == (0,)
    assert TokenStore.open(tmp_path / "s" / "x", {"a": 2}) is None
