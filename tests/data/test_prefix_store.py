"""The prefix cache survives interruption, keeps models apart and refuses a full disk."""

import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.prefix_store import PrefixStore

LENGTHS = [3, 5, 2, 4]
KEY = {"checkpoint": "aa", "tokenizer": "bb", "boundary": 2, "data": "cc"}


def states(index: int, embed_dim: int = 4) -> np.ndarray:
    return np.random.default_rng(index).normal(size=(LENGTHS[index], embed_dim)).astype(np.float32)


def opened(directory, key=KEY, lengths=LENGTHS, dtype="float32", report=lambda line: None) -> PrefixStore:
    return PrefixStore.open(directory, key, lengths, 4, dtype, report)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read_back_after_reopening(tmp_path, dtype):
    store = opened(tmp_path, dtype=dtype)
    assert store.missing() == [0, 1, 2, 3]
    store.write([2, 0], [states(2), states(0)])
    store.close()
    store = opened(tmp_path, dtype=dtype)
    assert store.missing() == [1, 3]
    for index in (0, 2):
        got = store.read(index)
        assert got.dtype == (np.float32 if dtype == "float32" else ml_dtypes.bfloat16)
        assert np.array_equal(got, states(index).astype(got.dtype))
    with pytest.raises(KeyError, match="example 1"):
        store.read(1)


def test_a_batch_has_the_layout_of_its_tokens(tmp_path):
    store = opened(tmp_path)
    store.write(range(4), [states(i) for i in range(4)])
    batch = store.batch(((1, 2), (), (3,)), length=8)
    assert batch.shape == (3, 8, 4) and batch.dtype == np.float32
    assert np.array_equal(batch[0, :5], states(1)) and np.array_equal(batch[0, 5:7], states(2))
    assert np.array_equal(batch[2, :4], states(3))
    assert not batch[0, 7:].any() and not batch[1].any() and not batch[2, 4:].any()
    left = store.batch(((1, 2),), length=8, left_pad=True)
    assert np.array_equal(left[0, 1:], batch[0, :7]) and not left[0, 0].any()


def test_the_size_is_told_beforehand_and_the_disk_is_reserved(tmp_path):
    lines = []
    store = opened(tmp_path, dtype="bfloat16", report=lines.append)
    assert store.num_bytes == PrefixStore.size(LENGTHS, 4, "bfloat16") == 14 * 4 * 2
    assert len(lines) == 1 and "needs 0.00 MB" in lines[0] and str(store.path) in lines[0]
    assert (store.path / "states").stat().st_size == 112
    assert (store.path / "states").stat().st_blocks > 0


def test_another_key_type_or_corpus_has_another_place_and_the_old_one_is_reported(tmp_path):
    first = opened(tmp_path)
    first.write(range(4), [states(i) for i in range(4)])
    lines = []
    for store in (
        opened(tmp_path, KEY | {"boundary": 3}, report=lines.append),
        opened(tmp_path, lengths=[4, 4, 2, 4]),
        opened(tmp_path, dtype="bfloat16"),
    ):
        assert store.path != first.path
        assert store.missing() == [0, 1, 2, 3]
    assert "1 other caches" in lines[0]
    assert opened(tmp_path).missing() == []


def test_a_store_without_its_index_or_cut_short_starts_again(tmp_path):
    for damage in ("index", "states"):
        store = opened(tmp_path)
        store.write(range(4), [states(i) for i in range(4)])
        if damage == "index":
            (store.path / "index.json").unlink()
        else:
            os.truncate(store.path / "states", 20)
        again = opened(tmp_path)
        assert again.missing() == [0, 1, 2, 3], damage
        assert (again.path / "states").stat().st_size == again.num_bytes


def test_a_full_disk_is_refused_before_anything_is_reserved(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 990, 10))
    with pytest.raises(UserError, match=r"are needed in .* but only"):
        opened(tmp_path)
    assert not list(tmp_path.glob("*/states"))


def test_a_disk_that_fills_while_reserving_is_a_user_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(UserError, match=r"No space left on device at .* choose another cache directory"):
        opened(tmp_path)


def test_a_refused_write_leaves_the_examples_missing(tmp_path, monkeypatch):
    store = opened(tmp_path)

    def refuse(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", refuse)
        with pytest.raises(UserError, match="Input/output error while writing"):
            store.write([0], [states(0)])
    with pytest.raises(ValueError, match="example 1 has states"):
        store.write([1], [states(0)])
    assert store.missing() == [0, 1, 2, 3]


def test_bad_arguments_are_user_errors(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="prefix cache: Not a directory"):
        opened(blocked / "cache")
    with pytest.raises(UserError, match="'float16'; expected one of float32, bfloat16"):
        opened(tmp_path, dtype="float16")
    with pytest.raises(UserError, match="no example"):
        opened(tmp_path, lengths=[])


KILLED = """
import sys
import numpy as np
from calyrex_jax.data.prefix_store import PrefixStore
store = PrefixStore.open(sys.argv[1], {"a": 1}, [64] * 4000, 64, "float32", lambda line: None)
for index in store.missing():
    store.write([index], [np.full((64, 64), index, np.float32)])
    print(index, flush=True)
"""


def test_a_kill_leaves_only_whole_examples_marked(tmp_path):
    done: set[int] = set()
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        seen = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        assert not done & set(seen)  # the second run goes on behind the first
        store = PrefixStore.open(tmp_path, {"a": 1}, [64] * 4000, 64, "float32", lambda line: None)
        done = set(range(4000)) - set(store.missing())
        assert set(seen) <= done < set(range(4000))
        assert all(np.all(store.read(index) == index) for index in done)


def test_finished_gives_whole_stores_alone_and_makes_nothing(tmp_path):
    arguments = (tmp_path / "cache", KEY, LENGTHS, 4, "float32")
    assert PrefixStore.finished(*arguments) is None and not (tmp_path / "cache").exists()
    store = opened(tmp_path / "cache")
    store.write([0, 1, 2], [states(i) for i in range(3)])
    assert PrefixStore.finished(*arguments) is None
    store.write([3], [states(3)])
    assert np.array_equal(PrefixStore.finished(*arguments).read(3), states(3))
    assert PrefixStore.finished(tmp_path / "cache", KEY | {"boundary": 1}, LENGTHS, 4, "float32") is None
