"""The order, the shapes and the content of batches."""

import json
import time
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import bucket
from calyrex_jax.data import pipeline
from calyrex_jax.data.prefix_store import PrefixStore


@dataclass(frozen=True)
class Conversation:
    """The three arrays that the pipeline reads of an Example."""

    tokens: np.ndarray
    system: np.ndarray
    targets: np.ndarray
    distill: bool = False


def conversation(number: int, length: int, span: int = 3) -> Conversation:
    """Tokens number * 1000 + t; the first `span` are the system text, every third token is a target, the first included."""
    t = np.arange(length)
    return Conversation((number * 1000 + t).astype(np.int32), t < min(span, length), t % 3 == 0)


def corpus(count: int = 40, seed: int = 0, longest: int = 120) -> list[Conversation]:
    rng = np.random.default_rng(seed)
    return [conversation(i, int(rng.integers(4, longest)), span=int(rng.integers(0, 9))) for i in range(count)]


def used(batches) -> Counter:
    return Counter(i for planned in batches for row in planned.rows for i in row)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("count", [1, 7, 40, 333])
def test_an_epoch_holds_every_example_once_in_batches_of_one_size(packing, count):
    lengths = np.random.default_rng(count).integers(1, 200, count).tolist()
    for epoch in range(3):
        batches = pipeline.plan_epoch(lengths, batch_size=4, max_length=200, packing=packing, seed=5, epoch=epoch)
        assert used(batches) == Counter(range(count))
        assert {len(planned.rows) for planned in batches} == {4}
        assert all(sum(lengths[i] for i in row) <= planned.length for planned in batches for row in planned.rows)
        assert sum(() in planned.rows for planned in batches) <= 1  # at most one partial batch


@pytest.mark.parametrize("packing", [False, True])
def test_the_plan_is_a_pure_function_and_epochs_differ_in_order_only(packing):
    lengths = np.random.default_rng(0).integers(1, 200, 100).tolist()
    plan = [pipeline.plan_epoch(lengths, batch_size=4, max_length=200, packing=packing, seed=1, epoch=e) for e in (0, 0, 1)]
    other = pipeline.plan_epoch(lengths, batch_size=4, max_length=200, packing=packing, seed=2, epoch=0)
    assert plan[0] == plan[1]
    assert plan[0] != plan[2] and plan[0] != other
    assert Counter(b.length for b in plan[0]) == Counter(b.length for b in plan[2])


def test_without_packing_a_row_holds_one_example_near_its_own_length():
    lengths = [5, 6, 7, 8, 60, 61, 62, 63, 9]
    batches = pipeline.plan_epoch(lengths, batch_size=4, max_length=64, packing=False, seed=0, epoch=0)
    assert all(len(row) <= 1 for planned in batches for row in planned.rows)
    assert Counter(planned.length for planned in batches) == {32: 1, 64: 2}


def test_packing_is_dense_and_fast():
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.7, 50_000).astype(int), 8, 1024).tolist()  # mean about 250
    start = time.perf_counter()
    batches = pipeline.plan_epoch(lengths, batch_size=8, max_length=1024, packing=True, seed=0, epoch=0)
    seconds = time.perf_counter() - start
    efficiency = sum(lengths) / sum(planned.length * len(planned.rows) for planned in batches)
    assert efficiency >= 0.95
    assert seconds < 10
    assert used(batches) == Counter(range(50_000))


def test_a_length_outside_the_limit_is_refused():
    for bad in ([0, 4], [4, 65]):
        with pytest.raises(ValueError, match=r"outside 1\.\.64"):
            pipeline.plan_epoch(bad, batch_size=2, max_length=64, packing=False, seed=0, epoch=0)


def test_plan_pass_goes_once_through_the_chosen_examples_shortest_first():
    assert pipeline.plan_pass([40, 5, 6, 90], 2, indices=[0, 2, 3]) == [
        pipeline.PlannedBatch(64, ((2,), (0,))),
        pipeline.PlannedBatch(96, ((3,), ())),
    ]
    assert used(pipeline.plan_pass([9] * 13, 4)) == Counter(range(13))


def test_drop_unusable_counts_the_reasons():
    no_target = Conversation(np.arange(5, dtype=np.int32), np.zeros(5, bool), np.arange(5) == 0)
    kept, dropped = pipeline.drop_unusable([conversation(0, 10), conversation(1, 33), no_target, conversation(2, 32)], 32)
    assert [int(e.tokens[0]) for e in kept] == [0, 2000]
    assert dropped == {"longer than 32 tokens": 1, "nothing to predict": 1}


def test_a_packed_row_keeps_its_conversations_apart():
    rows = [[conversation(1, 4, span=2), conversation(2, 3, span=1)], []]
    batch = pipeline.make_batch(rows, 10, span_width=4, target_width=3, rows_total=3)
    assert batch.tokens[0].tolist() == [1000, 1001, 1002, 1003, 2000, 2001, 2002, 0, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 0, 0]
    assert batch.segments[0].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0, 0]
    assert np.flatnonzero(batch.system[0]).tolist() == [0, 1, 4]
    assert batch.span[0].tolist() == [0, 1, 4, -1]
    # Position 3 alone: the first token of a conversation (0 and 4) cannot be predicted from the one before it.
    assert np.flatnonzero(batch.targets[0]).tolist() == [3]
    assert batch.target_slots.tolist() == [[3, -1, -1], [-1] * 3, [-1] * 3]
    assert not batch.segments[1:].any() and not batch.targets[1:].any() and (batch.span[1:] == -1).all()
    for name in ("tokens", "positions", "segments", "span", "target_slots"):
        assert getattr(batch, name).dtype == np.int32, name
    assert batch.system.dtype == batch.targets.dtype == np.bool_
    assert batch.prefix is None and batch.distill is None


def test_distilled_conversations_are_marked_in_every_batch_of_their_corpus():
    made = [conversation(1, 4), replace(conversation(2, 3), distill=True)]
    batch = pipeline.make_batch([made, made[:1]], 8, distill=True)
    assert batch.distill.tolist() == [[False] * 4 + [True] * 3 + [False], [False] * 8]
    options = {"batch_size": 1, "max_length": 32, "threads": 0}
    marked, unmarked = (pipeline.Batches(talks, **options) for talks in (made, [made[0], conversation(2, 3)]))
    assert sorted(next(marked)[0].distill.any() for _ in range(2)) == [False, True]
    assert next(unmarked)[0].distill is None
    with pytest.raises(UserError, match="data order"):
        unmarked.set_state(marked.get_state())


def test_left_padding_moves_the_tokens_and_their_marks_to_the_end():
    batch = pipeline.make_batch([[conversation(1, 4, span=2)], [conversation(2, 6, span=0)]], 6, left_pad=True)
    assert batch.tokens[0].tolist() == [0, 0, 1000, 1001, 1002, 1003]
    assert batch.positions[0].tolist() == [0, 0, 0, 1, 2, 3]
    assert batch.segments[0].tolist() == [0, 0, 1, 1, 1, 1]
    assert batch.span[:, :3].tolist() == [[2, 3, -1], [-1, -1, -1]]
    assert np.flatnonzero(batch.targets[0]).tolist() == [5]
    assert batch.target_slots is None


def test_span_width_is_zero_where_no_row_has_a_system_text():
    batch = pipeline.make_batch([[conversation(1, 4, span=0)]], 8)
    assert batch.span.shape == (1, 0)


def test_nothing_is_cut_to_fit():
    one = conversation(1, 9, span=5)
    for arguments in ({"length": 8}, {"length": 9, "span_width": 4}, {"length": 9, "target_width": 1}):
        with pytest.raises(ValueError):
            pipeline.make_batch([[one]], **arguments)
    with pytest.raises(ValueError, match="2 rows"):
        pipeline.make_batch([[one], [one]], 9, rows_total=1)
    with pytest.raises(ValueError, match="prefix"):
        pipeline.make_batch([[one]], 9, prefix=np.zeros((1, 8, 2)))


@pytest.mark.parametrize("packing", [False, True])
def test_one_shape_a_bucket_over_epochs_and_no_row_exceeds_it(packing):
    examples = corpus(61)
    batches = pipeline.Batches(examples, batch_size=4, max_length=128, packing=packing, seed=3)
    shapes: dict[int, set] = {}
    for _ in range(5 * batches.steps_per_epoch):
        batch, info = next(batches)
        shapes.setdefault(info.length, set()).add((batch.tokens.shape, batch.span.shape[1], batch.target_slots.shape[1]))
        assert np.array_equal((batch.span >= 0).sum(1), batch.system.sum(1))
        assert np.array_equal((batch.target_slots >= 0).sum(1), batch.targets.sum(1))
    batches.close()
    assert {t: (s, m) for t, found in shapes.items() for (_, s, m) in found} == batches.shapes
    assert all(found == {((4, t), *batches.shapes[t])} for t, found in shapes.items())
    assert set(shapes) == ({128} if packing else {bucket(t) for t in shapes})


def same(a, b) -> bool:
    fields = ("tokens", "positions", "segments", "system", "targets", "span", "target_slots")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in fields)


@pytest.mark.parametrize("packing", [False, True])
def test_ten_batches_equal_five_then_a_restored_five(packing):
    def make():
        return pipeline.Batches(corpus(23), batch_size=4, max_length=128, packing=packing, seed=3)

    straight = make()
    ten = [next(straight) for _ in range(10)]
    first = make()
    head = [next(first) for _ in range(5)]
    state = json.loads(json.dumps(first.get_state()))
    second = make()
    next(second)  # the state is absolute: where the new iterator stands does not matter
    second.set_state(state)
    tail = [next(second) for _ in range(5)]
    assert [info for _, info in head + tail] == [info for _, info in ten]
    assert all(same(a, b) for (a, _), (b, _) in zip(head + tail, ten, strict=True))
    assert [info.step for _, info in ten] == list(range(10))
    assert ten[-1][1].epoch == 9 // straight.steps_per_epoch


def test_info_counts_the_whole_batch():
    examples = corpus(23)
    batches = pipeline.Batches(examples, batch_size=4, max_length=128, process_index=1, process_count=2)
    infos = [next(batches)[1] for _ in range(batches.steps_per_epoch)]
    assert sum(info.examples for info in infos) == 23
    assert sum(info.tokens for info in infos) == sum(len(e.tokens) for e in examples)
    assert sum(info.targets for info in infos) == sum(int(e.targets[1:].sum()) for e in examples)


@pytest.mark.parametrize("packing", [False, True])
def test_two_hosts_together_make_the_global_batch(packing):
    examples = corpus(23)

    def make(index, count):
        return pipeline.Batches(
            examples, batch_size=4, max_length=128, packing=packing, process_index=index, process_count=count
        )

    whole, hosts = make(0, 1), [make(0, 2), make(1, 2)]
    assert {host.steps_per_epoch for host in hosts} == {whole.steps_per_epoch}
    assert all(host.shapes == whole.shapes for host in hosts)
    for _ in range(2 * whole.steps_per_epoch):
        batch, _ = next(whole)
        (a, info_a), (b, info_b) = (next(host) for host in hosts)
        assert a.tokens.shape == b.tokens.shape == (2, batch.tokens.shape[1])
        assert (info_a.tokens, info_a.step) == (info_b.tokens, info_b.step)
        joined = np.stack([a.tokens, b.tokens], axis=1).reshape(batch.tokens.shape)
        assert np.array_equal(joined, batch.tokens)


def test_a_foreign_order_is_refused():
    state = pipeline.Batches(corpus(9), batch_size=4, max_length=128, seed=0).get_state()
    for change in ({"seed": 1}, {"batch_size": 2}, {"packing": True}, {"max_length": 256}):
        other = pipeline.Batches(corpus(9), **{"batch_size": 4, "max_length": 128, "seed": 0} | change)
        with pytest.raises(UserError, match="data order"):
            other.set_state(state)
    with pytest.raises(UserError, match="data order"):
        pipeline.Batches(corpus(10), batch_size=4, max_length=128, seed=0).set_state(state)


def test_no_batches_and_uneven_hosts_are_user_errors():
    with pytest.raises(UserError, match="no conversation is left"):
        pipeline.Batches([], batch_size=4, max_length=128)
    with pytest.raises(UserError, match=r"train\.batch_size is 3"):
        pipeline.Batches(corpus(9), batch_size=3, max_length=128, process_count=2)


def test_fewer_examples_than_a_batch_still_make_one():
    batches = pipeline.Batches(corpus(3), batch_size=8, max_length=128)
    batch, info = next(batches)
    assert batches.steps_per_epoch == 1 and info.examples == 3
    assert sorted(batch.segments.max(axis=1).tolist()) == [0] * 5 + [1] * 3


@pytest.mark.parametrize("packing", [False, True])
def test_the_prefix_lies_under_its_own_tokens(tmp_path, packing):
    examples = corpus(11)
    lengths = [len(e.tokens) for e in examples]
    store = PrefixStore.open(tmp_path, {}, lengths, 2, "float32", lambda line: None)
    store.write(range(11), [np.stack([e.tokens, e.tokens * 2], axis=1).astype(np.float32) for e in examples])
    batches = pipeline.Batches(
        examples, batch_size=6, max_length=128, packing=packing, prefix_store=store, process_index=1, process_count=2
    )
    for _ in range(2 * batches.steps_per_epoch):
        batch, _ = next(batches)
        assert batch.prefix.shape == (*batch.tokens.shape, 2)
        assert np.array_equal(batch.prefix, np.stack([batch.tokens, batch.tokens * 2], axis=2))


def test_the_fingerprint_sees_order_boundaries_and_ids():
    a, b = conversation(1, 4), conversation(2, 3)
    joined = Conversation(np.concatenate([a.tokens, b.tokens]), np.zeros(7, bool), np.zeros(7, bool))
    prints = {pipeline.fingerprint(e) for e in ([a, b], [b, a], [a], [joined], [conversation(3, 4), b])}
    assert len(prints) == 5
    assert pipeline.fingerprint([a, b]) == pipeline.fingerprint([conversation(1, 4, span=0), b])  # marks do not matter
