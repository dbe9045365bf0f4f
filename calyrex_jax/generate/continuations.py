"""Log-probabilities of continuations of contexts, and whether greedy decoding would choose them.

continuation_scores(model, params, [context + continuation], [len(context)], pad_id=0)      # (-3.2, False) a pair
choice_scores(model, params, [context], [[ids of single-token continuations]], pad_id=0)    # one pass for all choices
compared_choices({"cal": (model, adapters)}, backbone, [context], [[…]], pad_id=0)          # the same of several models
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.backbones import decoder
from calyrex_jax.core.types import Array, Batch, Tree
from calyrex_jax.generate.batching import Sequenced, assemble, check, plan, rows_of
from calyrex_jax.generate.score import by_token, logprob
from calyrex_jax.model import Model


@dataclass(frozen=True)
class Prompt:
    """Tokens int32 [T] and their system mask bool [T]."""

    tokens: np.ndarray
    system: np.ndarray


def continuation_scores(
    model: Model,
    params: Tree,
    sequences: Sequence[Sequenced],
    starts: Sequence[int],
    *,
    pad_id: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, float, bool]]:
    """(index, summed log-probability of tokens[start:], whether each of them is the most probable), batch by batch.

    A sequence may have one token more than the backbone has positions: its last is predicted and never read.
    """
    inputs = [Prompt(s.tokens[:-1], s.system[:-1]) for s in sequences]
    check(model.spec, inputs, 0, None)
    size = rows_of(batch_size, len(inputs), None)
    done = tokens = 0
    for chosen in plan([len(s.tokens) for s in inputs], max(size, 1)):
        batch = assemble([inputs[index] for index in chosen], size, pad_id, left_pad=False)
        labels = np.zeros_like(batch.tokens)
        for row, index in enumerate(chosen):
            labels[row, : len(inputs[index].tokens)] = sequences[index].tokens[1:]
        logprobs, greedy = jax.device_get(_continue(model, params, batch, labels))
        for row, index in enumerate(chosen):
            part = slice(starts[index] - 1, len(inputs[index].tokens))
            yield index, float(logprobs[row, part].sum(dtype=np.float64)), bool(greedy[row, part].all())
            tokens += len(inputs[index].tokens)
        done += len(chosen)
        if progress is not None:
            progress(done, tokens)


def choice_scores(
    model: Model,
    params: Tree,
    contexts: Sequence[Sequenced],
    choices: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, np.ndarray, int]]:
    """(index, log-probability of each choice after its context float32 [K], the most probable id), batch by batch."""
    subjects = {"": (model, params["adapters"])}
    options = {"pad_id": pad_id, "batch_size": batch_size, "progress": progress}
    for index, found in compared_choices(subjects, params["backbone"], contexts, choices, **options):
        yield index, *found[""]


def compared_choices(
    subjects: Mapping[str, tuple[Model, Tree]],
    backbone: Tree,
    contexts: Sequence[Sequenced],
    choices: Sequence[Sequence[int]],
    *,
    pad_id: int,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[int, dict[str, tuple[np.ndarray, int]]]]:
    """(index, {name: what `choice_scores` gives}) of several models, batch by batch.

    subjects  {name: (model, its adapters' parameters)}; all models have the same first boundary, below which the layers
              read each context once for all of them
    progress  called with the contexts of all subjects together
    """
    models = [model for model, _ in subjects.values()]
    if len({(m.spec, m.first_boundary) for m in models}) != 1:
        raise ValueError("only models of one backbone and with one first boundary share a prefix")
    check(models[0].spec, contexts, 0, None)
    size, width = rows_of(batch_size, len(contexts), None), max(map(len, choices), default=1)
    done = tokens = 0
    for chosen in plan([len(c.tokens) for c in contexts], max(size, 1)):
        batch = assemble([contexts[index] for index in chosen], size, pad_id, left_pad=True)
        ids = np.zeros((size, width), np.int32)
        for row, index in enumerate(chosen):
            ids[row, : len(choices[index])] = choices[index]
        prefix = _below(models[0], backbone, batch)
        rows: list[dict[str, tuple[np.ndarray, int]]] = [{} for _ in chosen]
        for name, (model, adapters) in subjects.items():
            logprobs, best = jax.device_get(_choose(model, {"backbone": backbone, "adapters": adapters}, batch, ids, prefix))
            for row, index in enumerate(chosen):
                rows[row][name] = logprobs[row, : len(choices[index])], int(best[row])
                tokens += len(contexts[index].tokens)
            done += len(chosen)
            if progress is not None:
                progress(done, tokens)
        yield from zip(chosen, rows)


@partial(jax.jit, static_argnums=0)
def _continue(model: Model, params: Tree, batch: Batch, labels: Array) -> tuple[Array, Array]:
    """[B, T] float32 and bool: log-probability of each label, and whether it is the most probable token."""

    def read(logits, label):
        return logprob(logits, label), jnp.argmax(logits, axis=-1) == label

    return by_token(model.hidden(params, batch), decoder.head_matrix(params["backbone"]), labels, read)


@partial(jax.jit, static_argnums=0)
def _below(model: Model, backbone: Tree, batch: Batch) -> Array:
    return model.prefix(backbone, batch)


@partial(jax.jit, static_argnums=0)
def _choose(model: Model, params: Tree, batch: Batch, ids: Array, prefix: Array) -> tuple[Array, Array]:
    """After left-padded contexts: log-probabilities [B, K] of the ids [B, K], and the most probable id [B]."""
    logits = decoder.logits(model.spec, params["backbone"], model.hidden(params, batch, prefix)[:, -1])
    return jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), ids, axis=-1), jnp.argmax(logits, axis=-1)
