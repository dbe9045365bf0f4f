"""From encoded conversations to batches: which rows stand together, in which order, in which shapes.

The plan is a pure function of (lengths, seed, epoch): every host computes the same plan and takes its own rows of each
batch, so all hosts make the same number of steps and a run resumes from one integer. Shapes are fixed once for the
corpus, one for each length bucket, so each bucket compiles once.
"""

from __future__ import annotations

import functools
import hashlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grain
import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Batch, bucket, slots

if TYPE_CHECKING:
    from calyrex_jax.data.chat import Example
    from calyrex_jax.data.prefix_store import PrefixStore

Row = tuple[int, ...]  # indices of the examples that stand in one row, in order; () is an empty row

SLOT_UNIT = 16  # span and target widths are rounded up to `bucket(n, SLOT_UNIT)`
ENDLESS = 1 << 40  # steps in the iterator; training stops long before


@dataclass(frozen=True)
class PlannedBatch:
    """The rows of one global batch and the length T to which they are padded."""

    length: int
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class BatchInfo:
    """What a batch holds: `tokens`, `targets`, `examples` count over all hosts; `rows` are this host's."""

    step: int
    epoch: int
    length: int
    rows: tuple[Row, ...]
    examples: int
    tokens: int
    targets: int


def drop_unusable(examples: Sequence[Example], max_length: int) -> tuple[list[Example], dict[str, int]]:
    """The examples that can be trained on, and how many were left out for which reason.

    Nothing is ever cut: an over-long conversation would lose its targets, or its system text.

        kept, dropped = drop_unusable(examples, 512)    # dropped == {"longer than 512 tokens": 3, "nothing to predict": 1}
    """
    kept: list[Example] = []
    dropped: dict[str, int] = {}
    for example in examples:
        if len(example.tokens) > max_length:
            reason = f"longer than {max_length} tokens"
        elif not np.any(example.targets[1:]):
            reason = "nothing to predict"
        else:
            kept.append(example)
            continue
        dropped[reason] = dropped.get(reason, 0) + 1
    return kept, dropped


def fingerprint(examples: Sequence[Example]) -> str:
    """SHA-256 over the token ids of all examples, in order: the data part of a prefix cache's key."""
    digest = hashlib.sha256()
    for example in examples:
        digest.update(len(example.tokens).to_bytes(8, "little"))
        digest.update(np.asarray(example.tokens, "<i4").tobytes())
    return digest.hexdigest()


def pack(lengths: Sequence[int], capacity: int, seed: int) -> list[Row]:
    """Every index once, in rows whose lengths sum to `capacity` at most: best fit, longest first, ties in random order.

    >>> pack([60, 30, 50, 40], 100, seed=0)
    [(0, 3), (2, 1)]
    """
    sizes = np.asarray(lengths)
    shuffled = np.random.default_rng([seed % 2**32]).permutation(len(sizes))
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted: the first that is large enough fits best
    for index in shuffled[np.argsort(-sizes[shuffled], kind="stable")].tolist():
        need = int(sizes[index])
        at = bisect_left(room, (need, -1))
        if at == len(room):
            free, row = capacity, len(rows)
            rows.append([])
        else:
            free, row = room.pop(at)
        rows[row].append(index)
        if free > need:
            insort(room, (free - need, row))
    return [tuple(row) for row in rows]


def plan_rows(lengths: Sequence[int], *, max_length: int, packing: bool, seed: int) -> dict[int, list[Row]]:
    """{padded length: rows}, ascending; the rows are the same in every epoch, only their order changes.

    Raises ValueError for a length outside 1..max_length: `drop_unusable` comes first.
    """
    if len(lengths) and (min(lengths) < 1 or max(lengths) > max_length):
        raise ValueError(f"lengths lie in {min(lengths)}..{max(lengths)}, outside 1..{max_length}")
    if packing:
        capacity = bucket(max_length)
        return {capacity: pack(lengths, capacity, seed)} if len(lengths) else {}
    groups: dict[int, list[Row]] = {}
    for index, length in enumerate(lengths):
        groups.setdefault(bucket(int(length)), []).append((index,))
    return dict(sorted(groups.items()))


def _plan_epoch(groups: dict[int, list[Row]], batch_size: int, seed: int, epoch: int) -> list[PlannedBatch]:
    rng = np.random.default_rng([seed % 2**32, epoch])
    batches: list[PlannedBatch] = []
    waiting: list[Row] = []
    for length, rows in groups.items():
        # What did not fill a batch goes first into the next longer one, so an epoch has one partial batch, not one a bucket.
        line = waiting + [rows[i] for i in rng.permutation(len(rows))]
        full = len(line) // batch_size * batch_size
        batches += [PlannedBatch(length, tuple(line[i : i + batch_size])) for i in range(0, full, batch_size)]
        waiting = line[full:]
    if waiting:
        empty: tuple[Row, ...] = ((),) * (batch_size - len(waiting))
        batches.append(PlannedBatch(max(groups), tuple(waiting) + empty))
    return [batches[i] for i in rng.permutation(len(batches))]


def plan_epoch(
    lengths: Sequence[int], *, batch_size: int, max_length: int, packing: bool, seed: int, epoch: int
) -> list[PlannedBatch]:
    """One epoch's batches: every example once, each batch of exactly `batch_size` rows, the last filled with empty rows.

    packing=False puts one example in a row, rows of like length together; packing=True fills rows of
    `bucket(max_length)` tokens. The number of batches of each length is the same in every epoch.

        >>> plan_epoch([5, 6, 40], batch_size=2, max_length=64, packing=False, seed=0, epoch=0)
        [PlannedBatch(length=64, rows=((2,), ())), PlannedBatch(length=32, rows=((0,), (1,)))]
    """
    return _plan_epoch(plan_rows(lengths, max_length=max_length, packing=packing, seed=seed), batch_size, seed, epoch)


def plan_pass(lengths: Sequence[int], batch_size: int, indices: Sequence[int] | None = None) -> list[PlannedBatch]:
    """One ordered pass, one example a row, shortest first: for evaluation and for building a prefix cache.

    >>> plan_pass([40, 5, 6], batch_size=2)
    [PlannedBatch(length=32, rows=((1,), (2,))), PlannedBatch(length=64, rows=((0,), ()))]
    """
    chosen = sorted(range(len(lengths)) if indices is None else indices, key=lambda i: (lengths[i], i))
    batches = []
    for start in range(0, len(chosen), batch_size):
        part = chosen[start : start + batch_size]
        rows = tuple((i,) for i in part) + ((),) * (batch_size - len(part))
        batches.append(PlannedBatch(bucket(max(int(lengths[i]) for i in part)), rows))
    return batches


def slot_width(count: int, length: int) -> int:
    """The static width for `count` marked positions in rows of `length`: 0 stays 0, else rounded up to a bucket."""
    return min(bucket(count, SLOT_UNIT), length) if count else 0


def widths(groups: dict[int, list[Row]], spans: Sequence[int], targets: Sequence[int]) -> dict[int, tuple[int, int]]:
    """{padded length: (span width S, target width M)} that no row of `groups` exceeds.

    A row can be carried into any longer bucket, so widths never fall from one bucket to the next.
    """
    found: dict[int, tuple[int, int]] = {}
    span = target = 0
    for length, rows in groups.items():
        span = max(span, max(sum(int(spans[i]) for i in row) for row in rows))
        target = max(target, max(sum(int(targets[i]) for i in row) for row in rows))
        found[length] = (slot_width(span, length), slot_width(target, length))
    return found


def make_batch(
    rows: Sequence[Sequence[Example]],
    length: int,
    span_width: int | None = None,
    target_width: int | None = None,
    prefix: np.ndarray | None = None,
    left_pad: bool = False,
    rows_total: int | None = None,
    distill: bool = False,
) -> Batch:
    """Rows of examples as one Batch of numpy arrays, [B, T] with T = `length`.

    span_width    S; None: what these rows need, rounded up
    target_width  M; None: no `target_slots`
    prefix        [B, T, D], as `PrefixStore.batch` assembles it
    left_pad      padding before the tokens, for generation
    rows_total    B; rows beyond those given are empty (segments 0)
    distill       whether the batch says which targets are distilled; one choice a corpus, for one compilation

    The first token of a conversation has nothing before it, so it is never a target.
    Raises ValueError where a row does not fit `length` or the widths: nothing is cut.
    """
    total = len(rows) if rows_total is None else rows_total
    if len(rows) > total:
        raise ValueError(f"{len(rows)} rows do not fit a batch of {total}")
    tokens, positions, segments = (np.zeros((total, length), np.int32) for _ in range(3))
    system, targets, distilled = (np.zeros((total, length), np.bool_) for _ in range(3))
    for r, row in enumerate(rows):
        used = sum(len(example.tokens) for example in row)
        if used > length:
            raise ValueError(f"row {r} has {used} tokens but the batch length is {length}")
        at = length - used if left_pad else 0
        for segment, example in enumerate(row, start=1):
            n = len(example.tokens)
            here = slice(at, at + n)
            tokens[r, here], system[r, here], targets[r, here] = example.tokens, example.system, example.targets
            positions[r, here] = np.arange(n)
            segments[r, here] = segment
            targets[r, at] = False
            distilled[r, here] = example.distill
            at += n
    if span_width is None:
        span_width = slot_width(int(system.sum(axis=1).max(initial=0)), length)
    if prefix is not None and prefix.shape[:2] != (total, length):
        raise ValueError(f"prefix has shape {prefix.shape}, expected ({total}, {length}, D)")
    return Batch(
        tokens=tokens,
        positions=positions,
        segments=segments,
        system=system,
        targets=targets,
        span=slots(system, span_width),
        target_slots=None if target_width is None else slots(targets, target_width),
        prefix=prefix,
        distill=distilled if distill else None,
    )


class Batches(Iterator[tuple[Batch, BatchInfo]]):
    """Training batches without end, epoch after epoch, made ahead by grain's threads; resumes exactly.

        batches = Batches(examples, batch_size=8, max_length=512)
        batch, info = next(batches)
        state = batches.get_state()     # {"iterator": {"next_index": 1}, "order": "3f…"}: small, JSON

    shapes           {T: (S, M)}, one for each shape that will ever occur
    steps_per_epoch  batches in an epoch, the same for every epoch and host

    Raises UserError where there is nothing to train on or `batch_size` does not divide over the hosts.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        *,
        batch_size: int,
        max_length: int,
        packing: bool = False,
        seed: int = 0,
        prefix_store: PrefixStore | None = None,
        process_index: int = 0,
        process_count: int = 1,
        threads: int = 2,
        ahead: int = 4,
    ):
        if not len(examples):
            raise UserError(
                "data: no conversation is left to train on; at least 1 is needed; check data.source and data.max_length"
            )
        if batch_size < 1 or batch_size % process_count:
            raise UserError(
                f"config: train.batch_size is {batch_size}; a positive multiple of the {process_count} processes is needed; "
                "set config.train.batch_size"
            )
        self._examples, self._store = examples, prefix_store
        self._host = slice(process_index, None, process_count)
        self._lengths = [len(example.tokens) for example in examples]
        self._targets = [int(np.count_nonzero(example.targets[1:])) for example in examples]
        spans = [int(np.count_nonzero(example.system)) for example in examples]
        groups = plan_rows(self._lengths, max_length=max_length, packing=packing, seed=seed)
        self._plan = functools.lru_cache(maxsize=2)(lambda epoch: _plan_epoch(groups, batch_size, seed, epoch))
        first = self._plan(0)
        occurring = {planned.length for planned in first}
        self.shapes = {t: w for t, w in widths(groups, spans, self._targets).items() if t in occurring}
        self.steps_per_epoch = len(first)
        self._distill = any(example.distill for example in examples)
        settings = f"{batch_size} {max_length} {packing} {seed} {fingerprint(examples)}"
        settings += f" {[i for i, e in enumerate(examples) if e.distill]}" if self._distill else ""
        self._order = hashlib.sha256(settings.encode()).hexdigest()[:16]
        reading = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead if threads else 0)
        self._iterator = iter(grain.MapDataset.range(ENDLESS).map(self._build).to_iter_dataset(reading))

    def _build(self, step: int) -> tuple[Batch, BatchInfo]:
        epoch, at = divmod(int(step), self.steps_per_epoch)
        planned = self._plan(epoch)[at]
        rows = planned.rows[self._host]
        here = [i for row in planned.rows for i in row]
        span_width, target_width = self.shapes[planned.length]
        prefix = None if self._store is None else self._store.batch(rows, planned.length)
        examples = [[self._examples[i] for i in row] for row in rows]
        info = BatchInfo(
            step=int(step),
            epoch=epoch,
            length=planned.length,
            rows=rows,
            examples=len(here),
            tokens=sum(self._lengths[i] for i in here),
            targets=sum(self._targets[i] for i in here),
        )
        batch = make_batch(examples, planned.length, span_width, target_width, prefix, distill=self._distill)
        return batch, info

    def __next__(self) -> tuple[Batch, BatchInfo]:
        return next(self._iterator)

    def get_state(self) -> dict:
        """What `set_state` needs to go on with the next batch: a small dictionary that JSON can hold."""
        return {"iterator": self._iterator.get_state(), "order": self._order}

    def set_state(self, state: dict) -> None:
        """Goes on exactly where `get_state` was taken.

        Raises UserError where the state belongs to other conversations, seed, batch size, length or packing.
        """
        if state.get("order") != self._order:
            raise UserError(
                "checkpoint: its data order belongs to other conversations or another train.seed, train.batch_size, "
                "data.max_length or data.packing, and cannot be continued; set them back or use a new --workdir"
            )
        self._iterator.set_state(state["iterator"])

    def close(self) -> None:
        """Ends the threads that prepare batches."""
        self._iterator.close()
