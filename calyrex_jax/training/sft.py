"""Supervised fine-tuning's own parts: the prefix cache is filled here, batch by batch, from the frozen layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from calyrex_jax.core.types import Tree, bucket
from calyrex_jax.data import pipeline
from calyrex_jax.data.chat import Example
from calyrex_jax.data.prefix_store import PrefixStore
from calyrex_jax.model import Model

ROW, TOKENS = (
    512,
    2048,
)  # packed rows of one length need one compilation; more tokens a batch would only lose more when interrupted


def fill_prefix_store(
    model: Model,
    backbone: Tree,
    examples: Sequence[Example],
    store: PrefixStore,
    advance: Callable[[int], None],
    below: tuple[int, PrefixStore] | None = None,
) -> None:
    """Computes and stores the hidden states at the first boundary of every example that the store lacks.

    `advance(tokens)` is called after each batch, when its states are on disk; it may raise to stop. `below` is a lower
    boundary with the finished store of its states: only the layers from there on are run.
    """
    missing = store.missing()
    lengths = [len(example.tokens) for example in examples]
    row_length = max(ROW, bucket(max((lengths[i] for i in missing), default=ROW)))
    size = max(TOKENS // row_length, 1)
    rows = [tuple(missing[i] for i in row) for row in pipeline.pack([lengths[i] for i in missing], row_length, seed=0)]
    start, lower = (0, None) if below is None else below
    prefix = jax.jit(lambda backbone, batch: model.prefix(backbone, batch, start))
    for start in range(0, len(rows), size):
        chosen = rows[start : start + size]
        # the span does not matter below the first boundary
        batch = pipeline.make_batch(
            [[examples[i] for i in row] for row in chosen], row_length, span_width=row_length, rows_total=size
        )
        if lower is not None:
            batch = batch.replace(prefix=lower.batch([*chosen, *[()] * (size - len(chosen))], row_length))
        states = np.asarray(prefix(backbone, batch))
        found: dict[int, np.ndarray] = {}
        for r, row in enumerate(chosen):
            at = 0
            for i in row:
                found[i] = states[r, at : at + lengths[i]]
                at += lengths[i]
        store.write(list(found), list(found.values()))
        advance(sum(lengths[i] for i in found))
