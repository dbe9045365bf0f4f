"""Batched generation: prefill, then a decode loop that runs wholly inside one compiled function.

    replies = generate(model, params, examples, max_new_tokens=64, stop_ids=tokenizer.stop_ids, pad_id=tokenizer.pad_id)
    tokenizer.decode(replies[0].text_tokens)

One compilation serves all batches of a (prompt bucket, span bucket) pair; weights are arguments, never constants. On CPUs a
long run decodes from layers of their own instead of the stack: see `worth_unstacking`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from calyrex_jax import guidance
from calyrex_jax.backbones import decoder
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.placing import on_mesh
from calyrex_jax.core.types import Array, Batch, Tree, bucket
from calyrex_jax.generate.batching import Sequenced, assemble, check, place, plan, rows_of
from calyrex_jax.generate.sampling import Sampling, choose
from calyrex_jax.model import Model

# on two cores of a server processor: what unrolling a layer adds to a compilation, and what is saved by not copying
_COMPILE_SECONDS, _COPIED_A_SECOND = 0.2, 16e9
_MEMORY_SHARE = 0.25  # of the machine's memory, for the copy


@dataclass(frozen=True)
class Reply:
    """What the model said to one prompt.

    tokens         the generated ids alone; the last is the stop id where finish_reason is "stop"
    finish_reason  "stop": a stop id was generated; "length": max_new_tokens were
    row            the prompt's index in the input
    harm           with SVGT, the harm probability at prefill and at each refresh: 1 + max(n-1, 0) // R values of n tokens
    """

    tokens: tuple[int, ...]
    finish_reason: str
    row: int
    harm: tuple[float, ...] = ()

    @property
    def text_tokens(self) -> tuple[int, ...]:
        """The ids that make up the completion's text: `tokens` without the stop id."""
        return self.tokens[:-1] if self.finish_reason == "stop" else self.tokens


def generate(model: Model, params: Tree, prompts: Sequence[Sequenced], **options) -> list[Reply]:
    """All replies, in input order; `options` are those of `stream`."""
    return list(stream(model, params, prompts, **options))


def stream(
    model: Model,
    params: Tree,
    prompts: Sequence[Sequenced],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int],
    pad_id: int,
    sampling: Sampling | None = None,
    batch_size: int = 8,
    vocab_limit: int | None = None,
    mesh: Mesh | None = None,
    where: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Reply]:
    """Replies in input order, each as soon as it and those before it are done.

    prompts      anything with `tokens` int32 [T] and `system` bool [T]
    sampling     default: greedy
    vocab_limit  the number of ids with a tokenizer entry; default: all rows of the embedding
    where        names the prompts in error messages
    progress     called after every batch with (replies, tokens) made so far

    All prompts are checked before the first is run: UserError where one has no token, a foreign id, or does not fit into
    the backbone's positions together with max_new_tokens.
    """
    sampling = Sampling() if sampling is None else sampling
    if max_new_tokens < 1:
        raise UserError(f"config.generate.max_new_tokens: got {max_new_tokens}, expected at least 1")
    if batch_size < 1:
        raise UserError(f"config.generate.batch_size: got {batch_size}, expected at least 1")
    check(model.spec, prompts, max_new_tokens + model.bridge_slots, where)
    limit = model.spec.vocab_size if vocab_limit is None else vocab_limit
    stops = np.asarray(sorted(set(stop_ids)), np.int32)
    size = rows_of(batch_size, len(prompts), mesh)
    seed = np.uint32(sampling.seed)
    layers = _decoding_layers(params["backbone"], prompts, size, max_new_tokens, programs=1 if model.svgt is None else 2)
    return _replies(
        model,
        partial(_run, model, max_new_tokens, replace(sampling, seed=0), limit, params, layers, stops, seed),
        prompts, size, pad_id, mesh, progress,
    )  # fmt: skip


def worth_unstacking(layers: Tree, steps: int, shapes: int) -> bool:
    """Whether `steps` decoding steps, in programs of `shapes` shapes, run sooner from `decoder.unstack(layers)`.

    Only on CPUs and in float32, where a step copies each layer out of the stack before it multiplies (a bfloat16 layer is
    half of that, and no gain was measured). Saved is that copy; paid for it are compilations of unrolled layers, some
    seconds each, and a second copy of the layers for as long as the run lasts, for which a quarter of the machine's memory
    is allowed.
    """
    leaves = jax.tree.leaves(layers)
    if jax.default_backend() != "cpu" or leaves[0].dtype != jnp.float32:
        return False
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if size > _MEMORY_SHARE * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"):
        return False
    return steps * size / _COPIED_A_SECOND > shapes * leaves[0].shape[0] * _COMPILE_SECONDS


def _decoding_layers(
    backbone: Tree, prompts: Sequence[Sequenced], size: int, new_tokens: int, runs: int = 1, programs: int = 1
) -> tuple[Tree, ...] | None:
    """The layers that decoding reads, one tree each, or None where it reads the stack, as prefill does.

    runs  times that every prompt is answered; `programs` decoding steps are compiled for each shape
    """
    lengths = [len(prompt.tokens) for prompt in prompts]
    longest = [max(bucket(lengths[row]) for row in chosen) for chosen in plan(lengths, max(size, 1))]
    steps = runs * len(longest) * new_tokens
    shapes = programs * len(set(longest))
    return decoder.unstack(backbone["layers"]) if worth_unstacking(backbone["layers"], steps, shapes) else None


def _replies(model: Model, run, prompts, size: int, pad_id: int, mesh, progress) -> Iterator[Reply]:
    """Runs the batches and hands out their replies in input order."""
    done: dict[int, Reply] = {}
    following, tokens = 0, 0
    for chosen in plan([len(p.tokens) for p in prompts], max(size, 1)):
        batch = assemble([prompts[row] for row in chosen], size, pad_id, left_pad=True)
        rows = np.zeros(size, np.int32)
        rows[: len(chosen)] = chosen
        with on_mesh(mesh):
            results = jax.device_get(run(*place((batch, rows), mesh)))
        for at, row in enumerate(chosen):
            done[row] = _reply(model, results, at, row)
            tokens += len(done[row].tokens)
        if progress is not None:
            progress(following + len(done), tokens)
        while following in done:
            yield done.pop(following)
            following += 1


def _reply(model: Model, results: tuple, at: int, row: int) -> Reply:
    """What `_run` gave for one row of its batch."""
    made, lengths, stopped, harm = results
    count = int(lengths[at])
    known = () if model.svgt is None else tuple(harm[at, : guidance.readings(model.svgt, count)].tolist())
    return Reply(tuple(made[at, :count].tolist()), "stop" if stopped[at] else "length", row, known)


def compare(
    model: Model, backbone: Tree, variants: dict[str, Tree], prompts: Sequence[Sequenced], **options
) -> dict[str, list[Reply]]:
    """Greedy replies of several trained states of the same adapters, {variant: replies in input order}.

    `options` are those of `stream_compare`.
    """
    subjects = {name: (model, adapters) for name, adapters in variants.items()}
    found = sorted(
        stream_compare(subjects, backbone, prompts, **options), key=lambda replies: min(r.row for r in replies.values())
    )
    return {name: [replies[name] for replies in found] for name in variants}


def stream_compare(
    subjects: dict[str, tuple[Model, Tree]],
    backbone: Tree,
    prompts: Sequence[Sequenced],
    *,
    max_new_tokens: int,
    stop_ids: Iterable[int],
    pad_id: int,
    batch_size: int = 8,
    vocab_limit: int | None = None,
    where: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[dict[str, Reply]]:
    """Greedy replies of several models to each prompt, {name: reply}, as soon as a batch is done.

    subjects  {name: (model, its adapters' parameters)}; all models have the same first boundary, below which the layers
              read each prompt once for all of them
    progress  called with the replies of all subjects together

    The other options and the errors are those of `stream`. Raises ValueError where the first boundaries differ.
    """
    models = [model for model, _ in subjects.values()]
    if len({(m.spec, m.first_boundary) for m in models}) != 1:
        raise ValueError("only models of one backbone and with one first boundary share a prefix")
    spec = models[0].spec
    check(spec, prompts, max_new_tokens + max(m.bridge_slots for m in models), where)
    limit = spec.vocab_size if vocab_limit is None else vocab_limit
    stops = np.asarray(sorted(set(stop_ids)), np.int32)
    size = rows_of(batch_size, len(prompts), None)
    made = tokens = 0
    layers = _decoding_layers(backbone, prompts, size, max_new_tokens, len(subjects))
    for chosen in plan([len(p.tokens) for p in prompts], max(size, 1)):
        batch = assemble([prompts[row] for row in chosen], size, pad_id, left_pad=True)
        prefix = _prefix(models[0], max_new_tokens, backbone, batch)
        replies: list[dict[str, Reply]] = [{} for _ in chosen]
        for name, (model, adapters) in subjects.items():
            params = {"backbone": backbone, "adapters": adapters}
            run = partial(_run, model, max_new_tokens, Sampling(), limit, params, layers, stops, np.uint32(0))
            results = jax.device_get(run(batch, np.arange(size, dtype=np.int32), prefix))
            for at, row in enumerate(chosen):
                replies[at][name] = _reply(model, results, at, row)
                tokens += len(replies[at][name].tokens)
            made += len(chosen)
            if progress is not None:
                progress(made, tokens)
        yield from replies


@partial(jax.jit, static_argnums=(0, 1))
def _prefix(model: Model, new_tokens: int, backbone: Tree, batch: Batch):
    return model.prefill_prefix(backbone, batch, _capacity(model, batch, new_tokens), new_tokens)


def _capacity(model: Model, batch: Batch, new_tokens: int) -> int:
    """Cache slots of a batch: padded prompt, bridge and reply."""
    return batch.tokens.shape[1] + model.bridge_slots + new_tokens


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    model: Model,
    new_tokens: int,
    sampling: Sampling,
    vocab_limit: int,
    params: Tree,
    layers: tuple[Tree, ...] | None,
    stops: Array,
    seed: Array,
    batch: Batch,
    rows: Array,
    prefix: tuple | None = None,
) -> tuple[Array, Array, Array, Array | None]:
    """Prompts in, replies out: tokens [B, new_tokens] int32, lengths [B] int32, stopped [B] bool, and SVGT's harm [B, n].

    layers  the backbone's, unstacked, to decode with; None: the stack
    """
    decoding = params if layers is None else params | {"backbone": params["backbone"] | {"layers": layers}}

    def pick(x: Array, step: Array) -> Array:
        return choose(decoder.logits(model.spec, params["backbone"], x), sampling, seed, rows, step, vocab_limit)

    def take(step: Array, token: Array, made: Array, lengths: Array, stopped: Array):
        """Writes a step's token to the rows that still run."""
        made = jax.lax.dynamic_update_slice(made, token[:, None], (0, step))
        lengths = jnp.where(stopped, lengths, step + 1)
        return made, lengths, stopped | (token[:, None] == stops).any(-1)

    count = rows.shape[0]
    x, state = model.prefill(params, batch, _capacity(model, batch, new_tokens), new_tokens, prefix)
    step = jnp.zeros((), jnp.int32)
    token = pick(x, step)
    fresh = jnp.zeros((count, new_tokens), jnp.int32), jnp.zeros(count, jnp.int32), ~(batch.segments > 0).any(-1)
    carry = (step + 1, token, *take(step, token, *fresh), state)

    def running(carry):
        step, _, _, _, stopped, _ = carry
        return (step < new_tokens) & ~stopped.all()

    def body(carry, refresh: bool = False):
        step, token, made, lengths, stopped, state = carry
        x, state = model.decode(decoding, token, state, refresh)
        token = pick(x, step)
        return (step + 1, token, *take(step, token, made, lengths, stopped), state)

    if model.svgt is not None:
        carry = _guided(running, body, model.svgt.refresh_every, carry)
    else:
        carry = jax.lax.while_loop(running, body, carry)
    _, _, made, lengths, stopped, state = carry
    return made, lengths, stopped, None if state.guide is None else state.guide.harm


def _guided(running: Callable, body: Callable, period: int, carry: tuple) -> tuple:
    """The decode loop in which every `period`-th step refreshes the bridge.

    A refresh is a loop of one turn: a conditional would copy the cache that it hands through.
    """

    def due(carry: tuple) -> Array:
        return carry[-1].guide.phase == period - 1

    def round_(carry: tuple) -> tuple:
        carry = jax.lax.while_loop(lambda c: running(c) & ~due(c), body, carry)
        return jax.lax.while_loop(lambda c: running(c) & due(c), partial(body, refresh=True), carry)

    return jax.lax.while_loop(running, round_, carry)


def lower(model: Model, params: Tree, batch: Batch, new_tokens: int, sampling: Sampling, mesh: Mesh | None):
    """The program that `stream` runs on `mesh`, traced for shapes alone: a plan compiles it."""
    rows = jax.ShapeDtypeStruct(batch.tokens.shape[:1], jnp.int32, sharding=batch.tokens.sharding)
    scalars = np.zeros(1, np.int32), np.uint32(0)
    with on_mesh(mesh):
        return _run.lower(model, new_tokens, sampling, model.spec.vocab_size, params, None, *scalars, batch, rows)
