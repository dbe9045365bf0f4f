import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import bucket
from calyrex_jax.generate.batching import assemble, check, max_positions, plan, rows_of
from calyrex_jax.sharding.mesh import AXES
from tests import tiny


def test_every_row_is_in_exactly_one_batch_near_its_turn():
    lengths = np.random.default_rng(0).integers(1, 500, 200).tolist()
    batches = list(plan(lengths, 4))
    assert sorted(row for batch in batches for row in batch) == list(range(200))
    assert all(len(batch) <= 4 for batch in batches) and len(batches) == 50
    for number, batch in enumerate(batches):
        assert all(abs(row // 4 - number) <= 16 for row in batch)


def test_a_batch_holds_similar_lengths():
    """Within a window the buckets descend: what needs the most memory comes first."""
    lengths = np.random.default_rng(1).integers(1, 500, 64).tolist()
    buckets = [bucket(lengths[row]) for batch in plan(lengths, 4) for row in batch]
    assert buckets == sorted(buckets, reverse=True)


def test_assembled_rows():
    talks = tiny.conversations((9, 40, 5))
    left, right = (assemble(talks, 4, pad_id=7, left_pad=pad) for pad in (True, False))
    assert left.tokens.shape == (4, bucket(40)) and left.span.shape == (4, 64)
    for row, talk in enumerate(talks):
        size = len(talk.tokens)
        for batch, here in ((left, slice(64 - size, 64)), (right, slice(0, size))):
            np.testing.assert_array_equal(batch.tokens[row, here], talk.tokens)
            np.testing.assert_array_equal(batch.positions[row, here], np.arange(size))
            np.testing.assert_array_equal(batch.system[row, here], talk.system)
            np.testing.assert_array_equal(batch.segments[row, here], 1)
            assert (batch.segments[row].sum(), batch.system[row].sum()) == (size, talk.system.sum())
            assert (batch.tokens[row][batch.segments[row] == 0] == 7).all()
            span = batch.span[row][batch.span[row] >= 0]
            np.testing.assert_array_equal(span, np.flatnonzero(batch.system[row]))
    assert left.segments[3].sum() == 0 and (left.span[3] == -1).all()


def test_without_any_system_text_there_are_no_slots():
    assert assemble(tiny.without_system(tiny.conversations()), 4, 0, True).span.shape == (4, 0)


def test_rows_divide_over_the_data_devices():
    one = jax.devices()[0]
    mesh = Mesh(np.array([one] * 6).reshape(3, 2, 1), AXES)
    assert [rows_of(8, n, None) for n in (1, 8, 100)] == [1, 8, 8]
    assert [rows_of(8, n, mesh) for n in (1, 6, 7, 100)] == [6, 6, 12, 12]


@pytest.mark.parametrize(
    ("name", "changes", "limit"),
    [
        ("gpt2", {}, 128),
        ("llama", {}, 256),
        ("dynamic", {}, 128),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}, 640),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
            1024,
        ),
        (
            "llama",
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)
def test_positions_that_a_backbone_has(name, changes, limit):
    spec = tiny.spec(name, **changes)
    assert max_positions(spec) == limit
    if limit < 2000:
        talk = tiny.conversations((limit - 10,))
        check(spec, talk, 10, None)
        with pytest.raises(UserError, match=rf"conversation 1: {limit - 10} tokens and 11 new ones, .* {limit} positions"):
            check(spec, talk, 11, None)


@pytest.mark.parametrize(
    ("token", "message"), [(97, "chats.jsonl:4: token id 97, but the backbone has only 97"), (-1, "token id -1")]
)
def test_foreign_ids_are_refused_by_line(token, message):
    good, bad = tiny.conversations((3, 4))
    bad.tokens[2] = token
    with pytest.raises(UserError, match=message):
        check(tiny.spec(), [good, bad], 1, ["chats.jsonl:1", "chats.jsonl:4"])


def test_an_empty_conversation_is_refused():
    with pytest.raises(UserError, match="conversation 1: no tokens"):
        check(tiny.spec(), [tiny.Conversation(np.zeros(0, np.int32), np.zeros(0, bool))], 1, None)
