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

from calyrex_jax.backbones import decoder
from calyrex_jax.core.errors import UserError
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
    """
    if batch_size < 1:
        raise UserError(f"config.generate.batch_size: got {batch_size}, expected at least 1")
    check(model.spec, conversations, 0, where)
    size = rows_of(batch_size, len(conversations), mesh)
    return _in_order(partial(_score, model, params), conversations, size, pad_id, mesh, progress)


def _in_order(run, conversations, size: int, pad_id: int, mesh, progress) -> Iterator[np.ndarray]:
    done: dict[int, np.ndarray] = {}
    following, tokens = 0, 0
    for chosen in plan([len(c.tokens) for c in conversations], max(size, 1)):
        batch = assemble([conversations[row] for row in chosen], size, pad_id, left_pad=False)
        made = jax.device_get(run(place(batch, mesh)))
        for at, row in enumerate(chosen):
            length = len(conversations[row].tokens)
            done[row] = np.concatenate([[np.float32(np.nan)], made[at, : length - 1]])
            tokens += length
        if progress is not None:
            progress(following + len(done), tokens)
        while following in done:
            yield done.pop(following)
            following += 1


@partial(jax.jit, static_argnums=0)
def _score(model: Model, params: Tree, batch: Batch) -> Array:
    """[B, T - 1] float32: entry i is log p(token i + 1 | tokens up to i)."""
    states = model.hidden(params, batch)[:, :-1]
    return token_logprobs(states, decoder.head_matrix(params["backbone"]), jnp.asarray(batch.tokens)[:, 1:])


def token_logprobs(states: Array, head: Array, labels: Array) -> jax.Array:
    """log softmax(states · headᵀ) at `labels`: states [B, M, D], head [V, D], labels [B, M] -> [B, M] float32."""
    return by_token(states, head, labels, logprob)


def logprob(logits: Array, labels: Array) -> jax.Array:
    """log softmax(logits) at `labels`: [B, c, V] and [B, c] -> [B, c]."""
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return picked - jax.nn.logsumexp(logits, axis=-1)


def by_token(states: Array, head: Array, labels: Array, read: Callable) -> Tree:
    """read(logits [B, c, V], labels [B, c]), a tree of [B, c], for all of states [B, M, D] in chunks: a tree of [B, M]."""
    rows, count, _ = states.shape
    size = max(1, min(_MAX_CHUNK, count, _CHUNK_LOGITS // (rows * head.shape[0])))
    room = -count % size

    def split(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, room)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(padded.reshape(rows, -1, size, *array.shape[2:]), 1, 0)

    def one(part):
        x, label = part
        return read(jnp.einsum("bcd,vd->bcv", x, head, preferred_element_type=jnp.float32), label)

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
