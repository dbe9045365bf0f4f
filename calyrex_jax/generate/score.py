"""Log-probabilities of given conversations, with the output head in chunks: B·T·V logits never exist.

logprobs = scores(model, params, examples, pad_id=tokenizer.pad_id)      # one float32 [T] a conversation, in order
perplexity(logprobs, [example.targets for example in examples])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from calyrex_jax import guidance
from calyrex_jax.backbones import decoder
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.placing import by_vocabulary, on_mesh
from calyrex_jax.core.quantized import table_logits, table_size
from calyrex_jax.core.types import Array, Batch, Tree
from calyrex_jax.generate.batching import Sequenced, assemble, check, place, plan, rows_of
from calyrex_jax.model import Model

_CHUNK_LOGITS = 2**25  # at once; 128 MiB in float32
_MAX_CHUNK = 128


def scores(model: Model, params: Tree, conversations: Sequence[Sequenced], **options) -> list[np.ndarray]:
    """All log-probabilities, in input order; `options` are those of `stream_scores`."""
    return list(stream_scores(model, params, conversations, **options))


def stream_scores(
    model: Model,
    params: Tree,
    conversations: Sequence[Sequenced],
    *,
    pad_id: int,
    batch_size: int = 8,
    mesh: Mesh | None = None,
    where: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[np.ndarray]:
    """log p(token i | those before it) of each conversation: float32 [T], in input order, as soon as it is known.

    Entry 0 is NaN: nothing comes before the first token. The other options and the errors are those of `loop.stream`.

    With SVGT, the last reply of a conversation (its last run of `targets`) is scored under guidance, as if it were being
    written; what stands before it is the prompt.
    """
    if batch_size < 1:
        raise UserError(f"config.generate.batch_size: got {batch_size}, expected at least 1")
    check(model.spec, conversations, model.bridge_slots, where)
    size = rows_of(batch_size, len(conversations), mesh)
    guided = None if model.svgt is None else partial(_guided, model, params, size, mesh)
    return _in_order(partial(_score, model, params), guided, conversations, size, pad_id, mesh, progress)


def _in_order(run, guided, conversations, size: int, pad_id: int, mesh, progress) -> Iterator[np.ndarray]:
    done: dict[int, np.ndarray] = {}
    following, tokens = 0, 0
    for chosen in plan([len(c.tokens) for c in conversations], max(size, 1)):
        batch = assemble([conversations[row] for row in chosen], size, pad_id, left_pad=False)
        with on_mesh(mesh):
            made = jax.device_get(run(place(batch, mesh)))
        for at, row in enumerate(chosen):
            length = len(conversations[row].tokens)
            done[row] = np.concatenate([[np.float32(np.nan)], made[at, : length - 1]])
            tokens += length
        if guided is not None:
            for row, start, found in guided([(row, conversations[row]) for row in chosen]):
                done[row][start:] = found
        if progress is not None:
            progress(following + len(done), tokens)
        while following in done:
            yield done.pop(following)
            following += 1


def _guided(model: Model, params: Tree, size: int, mesh, chosen: Sequence[tuple[int, Sequenced]]):
    """(row, where its last reply starts, log-probabilities of the reply) of those that have a prompt and a reply."""
    starts = [(row, conversation, reply_start(conversation.targets)) for row, conversation in chosen]
    starts = [part for part in starts if 0 < part[2] < len(part[1].tokens)]
    if not starts:
        return []
    talk = guidance.make_dialogue([c for _, c, _ in starts], [start for *_, start in starts], size)
    found = jax.device_get(_score_guided(model, params, place(talk, mesh)))
    return [(row, start, found[at, : len(c.tokens) - start]) for at, (row, c, start) in enumerate(starts)]


def reply_start(targets: np.ndarray) -> int:
    """Where the last run of true entries starts; the length where there is none.

    >>> reply_start(np.array([False, True, False, True, True, False]))
    3
    """
    at = np.flatnonzero(targets)
    if not len(at):
        return len(targets)
    breaks = np.flatnonzero(np.diff(at) > 1)
    return int(at[breaks[-1] + 1] if len(breaks) else at[0])


@partial(jax.jit, static_argnums=0)
def _score_guided(model: Model, params: Tree, talk: guidance.Dialogue) -> Array:
    """[B, T] float32: log p of each token of the replies."""
    states, _ = model.guided(params, talk)
    return token_logprobs(states, decoder.head_matrix(params["backbone"]), talk.reply)


@partial(jax.jit, static_argnums=0)
def _score(model: Model, params: Tree, batch: Batch) -> Array:
    """[B, T - 1] float32: entry i is log p(token i + 1 | tokens up to i)."""
    states = model.hidden(params, batch)[:, :-1]
    return token_logprobs(states, decoder.head_matrix(params["backbone"]), jnp.asarray(batch.tokens)[:, 1:])


def token_logprobs(states: Array, head: Tree, labels: Array) -> jax.Array:
    """log softmax(states · headᵀ) at `labels`: states [B, M, D], head [V, D], labels [B, M] -> [B, M] float32."""
    return by_token(states, head, labels, logprob)


def logprob(logits: Array, labels: Array) -> jax.Array:
    """log softmax(logits) at `labels`: [B, c, V] and [B, c] -> [B, c]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def by_token(states: Array, head: Tree, labels: Array, read: Callable) -> Tree:
    """read(logits [B, c, V], labels [B, c]), a tree of [B, c], for all of states [B, M, D] in chunks: a tree of [B, M]."""
    rows, count, _ = states.shape
    size = max(1, min(_MAX_CHUNK, count, _CHUNK_LOGITS // (rows * table_size(head))))
    room = -count % size

    def split(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, room)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, -1, size, *array.shape[2:]), 1, 0)

    def one(part):
        x, label = part
        return read(by_vocabulary(table_logits(x, head)), label)

    found = jax.lax.map(one, (split(states), split(labels)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, count + room)[:, :count], found)


def perplexity(logprobs: Iterable[np.ndarray], masks: Iterable[np.ndarray]) -> float:
    """exp of the mean negative log-probability over all tokens where the mask is true and something comes before them.

    One mean over all conversations' tokens, in float64: an average of averages would favour short ones. Raises
    ValueError where no token is left.
    """
    total, count = 0.0, 0
    for line, mask in zip(logprobs, masks, strict=True):
        chosen = np.asarray(line, np.float64)[1:][np.asarray(mask, bool)[1:]]
        total, count = total - chosen.sum(), count + chosen.size
    if count == 0:
        raise ValueError("perplexity of no token: every mask is empty")
    return float(np.exp(total / count))
