"""Prompts and replies into batches for SVGT: which rows stand together, in which shapes, from tokens or cached states.

A plan is a pure function of (lengths, seed, epoch), so that a run goes on from one integer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from calyrex_jax.data.labelled import EncodedLabelled
from calyrex_jax.data.prefix_store import PrefixStore
from calyrex_jax.guidance import Dialogue, dialogue_shape, make_dialogue
from calyrex_jax.training.svgt import Examples

_WINDOW = 16  # batches that are sorted together by length


@dataclass(frozen=True)
class Corpus:
    """Encoded examples and, in a store, their states at boundary l* + 1; `store` is None where they are not kept."""

    examples: Sequence[EncodedLabelled]
    store: PrefixStore | None = None

    @property
    def labels(self) -> np.ndarray:
        return np.array([example.label for example in self.examples], np.float32)


def plan(examples: Sequence[EncodedLabelled], batch_size: int, seed: int, epoch: int) -> list[list[int]]:
    """One epoch's batches of indices: every example once, those of like length together, in random order."""
    rng = np.random.default_rng([seed % 2**32, epoch])
    order = rng.permutation(len(examples))
    window = batch_size * _WINDOW
    batches = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window].tolist(), key=lambda i: (len(examples[i].tokens), i))
        batches += [part[at : at + batch_size] for at in range(0, len(part), batch_size)]
    return [batches[i] for i in rng.permutation(len(batches))]


def plan_pass(examples: Sequence[EncodedLabelled], batch_size: int, indices: Sequence[int] | None = None) -> list[list[int]]:
    """One ordered pass, the shortest first."""
    chosen = range(len(examples)) if indices is None else indices
    order = sorted(chosen, key=lambda i: (len(examples[i].tokens), i))
    return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]


def assembled(chosen: Sequence[EncodedLabelled], rows: int) -> Dialogue:
    """Examples as the rows of one dialogue batch."""
    return make_dialogue(chosen, [example.prompt_length for example in chosen], rows)


def stored_states(corpus: Corpus, indices: Sequence[int], rows: int) -> np.ndarray:
    """The states [rows, P + T, D] of examples from the store, laid out as `assembled` does tokens; zeros in padding."""
    chosen = [corpus.examples[i] for i in indices]
    before, behind = dialogue_shape([len(e.tokens) for e in chosen], [e.prompt_length for e in chosen])
    found = np.zeros((rows, before + behind, corpus.store.embed_dim), corpus.store.dtype)
    for row, (index, example) in enumerate(zip(indices, chosen)):
        at = before - example.prompt_length
        found[row, at : at + len(example.tokens)] = corpus.store.read(index)
    return found


def make_examples(dialogue: Dialogue, states, labels: Sequence[float]) -> Examples:
    """What stages 1 and 2 are given: states [rows, P + T, D] of a dialogue, and the labels of its first rows."""
    before = dialogue.prompt.shape[1]
    wanted = np.zeros(dialogue.reply.shape[0], np.float32)
    wanted[: len(labels)] = labels
    if not before:
        return Examples(states, dialogue.reply_mask, wanted)
    # the last prompt position stands as the reply's first state, as it does while a reply is written
    mask = np.concatenate([dialogue.prompt_mask[:, -1:], dialogue.reply_mask], axis=1)
    return Examples(states[:, before - 1 :], mask, wanted, states[:, :before], dialogue.prompt_mask)


def draw_triggers(replies: Sequence[int], rows: int, late: float, rng: np.random.Generator) -> np.ndarray:
    """[rows] int32: 0, the last prompt position, or with probability `late` a position of the reply before its last token."""
    found = np.zeros(rows, np.int32)
    for row, length in enumerate(replies):
        if length > 1 and rng.random() < late:
            found[row] = rng.integers(1, length)
    return found
