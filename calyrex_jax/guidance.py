"""SVGT while a reply is written: the newest token's state at l* is judged, and bridge slots above l* answer it.

    guide = begin(svgt, params, x, segments, new_tokens)      # x [B, P, D]: the prompts' states at boundary l* + 1
    guide = remember(guide, x_new)                            # every token that is read
    guide = refresh(svgt, params, guide)                      # with every R-th one

The bridge stands behind the prompt, at positions M … M+K-1 of a prompt of M tokens, in the layers above l* alone (late
binding); the reply starts at position M+K in every layer. Only `refresh` changes the bridge, and with it the keys and
values of its slots: earlier tokens of the reply keep what they saw.

Source: SVGT (arXiv 2605.11712), latent value bridge and guided decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.adapters.svgt import Svgt
from calyrex_jax.backbones.cache import Cache
from calyrex_jax.core.types import Array, Batch, Tree, bucket, slots

# the smallest padded lengths: every further shape would be compiled anew, and the layers' programs are long
_PROMPT, _REPLY = 128, 64


@flax.struct.dataclass
class Guide:
    """What guided decoding carries from token to token.

    value    the value space's own state
    pending  [B, R, D] states at l* of the tokens read since the last refresh
    bridge   [B, K, D] float32; of SVGT-Inject [B, 1, D], what is added to the stream
    harm     [B, 1 + max(n-1, 0) // R] float32 for n new tokens: the harm probability at prefill and at each refresh
    count    int32: how many of `harm` are known
    phase    int32: how many of `pending` are known
    first    [B] int32: the position of the bridge's first slot, which is the prompt's length
    slot     int32: the same slot's place in the cache
    """

    value: Tree
    pending: Array
    bridge: Array
    harm: Array
    count: Array
    phase: Array
    first: Array
    slot: Array

    @property
    def positions(self) -> jax.Array:
        """[B, K] int32, the positions of the bridge's slots."""
        return self.first[:, None] + jnp.arange(self.bridge.shape[1], dtype=jnp.int32)


def readings(svgt: Svgt, new_tokens: int) -> int:
    """How many harm probabilities a reply of `new_tokens` has: at prefill, and with every R-th token that is read.

    The last token of a reply is never read.
    """
    return 1 + max(new_tokens - 1, 0) // svgt.refresh_every


def begin(svgt: Svgt, params: Tree, x: Array, segments: Array, new_tokens: int) -> Guide:
    """The guide of left-padded prompts: x [B, P, D] at boundary l* + 1, segments [B, P] int32, 0 in padding.

    The last prompt position is the first trigger and stands as the reply's first state, and stays so.
    """
    # each refresh reads R states more; the last one is at or before new_tokens - 1
    value = svgt.value_space.begin(params["value_space"], x, segments > 0, 1 + new_tokens)
    z, value = svgt.value_space.extend(params["value_space"], value, x[:, -1:])
    score, bridge = _proposal(svgt, params, x[:, -1], z)
    harm = jnp.zeros((x.shape[0], readings(svgt, new_tokens)), jnp.float32)
    return Guide(
        value=value,
        pending=jnp.zeros((x.shape[0], svgt.refresh_every, x.shape[2]), x.dtype),
        bridge=bridge,
        harm=harm.at[:, 0].set(jax.nn.sigmoid(score)),
        count=jnp.ones((), jnp.int32),
        phase=jnp.zeros((), jnp.int32),
        first=(segments > 0).sum(-1).astype(jnp.int32),
        slot=jnp.asarray(x.shape[1], jnp.int32),
    )


def remember(guide: Guide, x: Array) -> Guide:
    """Takes note of one token's state [B, 1, D]."""
    pending = jax.lax.dynamic_update_slice(guide.pending, x, (0, guide.phase, 0))
    return guide.replace(pending=pending, phase=guide.phase + 1)


def refresh(svgt: Svgt, params: Tree, guide: Guide) -> Guide:
    """Judges the reply so far, R remembered tokens further, and moves the bridge towards what the newest one calls for."""
    z, value = svgt.value_space.extend(params["value_space"], guide.value, guide.pending)
    score, proposal = _proposal(svgt, params, guide.pending[:, -1], z)
    harm = jax.lax.dynamic_update_slice(guide.harm, jax.nn.sigmoid(score)[:, None], (0, guide.count))
    return guide.replace(
        value=value,
        bridge=svgt.momentum * guide.bridge + (1 - svgt.momentum) * proposal,
        harm=harm,
        count=guide.count + 1,
        phase=jnp.zeros_like(guide.phase),
    )


def _proposal(svgt: Svgt, params: Tree, trigger: Array, z: Array) -> tuple[jax.Array, jax.Array]:
    """Scores [B] and proposed bridges [B, K, D] of triggers [B, D] with values z [B, Z]."""
    space = svgt.value_space
    score = space.score(params["value_space"], z)
    return score, svgt.bridge.propose(params["bridge"], trigger, space.correction(params["value_space"], z))


def without_bridge(svgt: Svgt, cache: Cache, guide: Guide) -> Cache:
    """The cache as the layers up to l* see it: the bridge's slots hold nothing."""
    at = jnp.arange(cache.segments.shape[1])
    bridge = (at >= guide.slot) & (at < guide.slot + svgt.slots)
    return cache.replace(segments=jnp.where(bridge, 0, cache.segments))


@flax.struct.dataclass
class Dialogue:
    """Prompts and the replies to them, apart.

    prompt, prompt_mask  [B, P] int32 and bool, padded on the left
    reply, reply_mask    [B, T] int32 and bool, padded on the right
    span                 [B, S] int32: the prompt's slots that belong to the system text, -1 fills
    """

    prompt: Array
    prompt_mask: Array
    reply: Array
    reply_mask: Array
    span: Array

    def batch(self, gap: int) -> Batch:
        """Both in one row, [B, P + T]; the reply's positions start `gap` behind the prompt's."""
        mask = jnp.concatenate([self.prompt_mask, self.reply_mask], axis=1)
        positions = jnp.cumsum(mask, axis=1) - 1 + gap * (jnp.arange(mask.shape[1]) >= self.prompt.shape[1])
        tokens = jnp.concatenate([self.prompt, self.reply], axis=1)
        nothing = jnp.zeros_like(mask)
        return Batch(tokens, jnp.where(mask, positions, 0), mask.astype(jnp.int32), nothing, nothing, self.span)


def make_dialogue(chosen: Sequence[Any], prompts: Sequence[int], rows: int) -> Dialogue:
    """Conversations with `tokens` and `system`, cut behind their first `prompts` tokens, as numpy rows.

    Prompts and replies are padded to a bucket, rows beyond `chosen` are empty.
    """
    before, behind = dialogue_shape([len(c.tokens) for c in chosen], prompts)
    tokens = np.zeros((rows, before + behind), np.int32)
    mask, system = np.zeros(tokens.shape, bool), np.zeros(tokens.shape, bool)
    for row, (conversation, prompt) in enumerate(zip(chosen, prompts)):
        here = slice(before - prompt, before - prompt + len(conversation.tokens))
        tokens[row, here], mask[row, here], system[row, here] = conversation.tokens, True, conversation.system
    span = system[:, :before]
    width = int(span.sum(-1).max()) if before else 0
    span = slots(span, bucket(width, _REPLY) if width else 0)
    return Dialogue(tokens[:, :before], mask[:, :before], tokens[:, before:], mask[:, before:], span)


def dialogue_shape(lengths: Sequence[int], prompts: Sequence[int]) -> tuple[int, int]:
    """(P, T) of conversations of so many tokens with prompts of so many; no prompt stays none.

    >>> dialogue_shape([90, 40], [60, 0])
    (128, 64)
    """
    longest, replies = max(prompts), (length - prompt for length, prompt in zip(lengths, prompts))
    return bucket(longest, _PROMPT) if longest else 0, bucket(max(replies), _REPLY)


@flax.struct.dataclass
class Judged:
    """What the value space makes of whole dialogues: at the last prompt position and at each of the reply's.

    states  [B, 1 + T, D] at boundary l* + 1; mask [B, 1 + T]
    score   [B, 1 + T] float32; correction [B, 1 + T, Z]
    """

    states: Array
    mask: Array
    score: Array
    correction: Array


def judge(svgt: Svgt, value: Tree, x: Array, dialogue: Dialogue, key: Array | None = None) -> Judged:
    """Reads states x [B, P + T, D] of a dialogue with the value space's leaves."""
    start = dialogue.prompt.shape[1]
    states = x[:, start - 1 :]
    mask = jnp.concatenate([dialogue.prompt_mask[:, -1:], dialogue.reply_mask], axis=1)
    z = svgt.value_space.values(value, states, mask, x[:, :start], dialogue.prompt_mask, key)
    return Judged(states, mask, svgt.value_space.score(value, z), svgt.value_space.correction(value, z))


def proposals(svgt: Svgt, bridge: Tree, judged: Judged, triggers: Array) -> jax.Array:
    """The bridges that triggers [B, V] (indices into `judged`) call for, [B, V, K, D] float32."""
    states, steps = (jnp.take_along_axis(a, triggers[..., None], axis=1) for a in (judged.states, judged.correction))
    rows, versions = triggers.shape
    made = svgt.bridge.propose(bridge, states.reshape(rows * versions, -1), steps.reshape(rows * versions, -1))
    return made.reshape(rows, versions, *made.shape[1:])


def averaged(svgt: Svgt, made: Array) -> jax.Array:
    """Every bridge that was in force, [B, V, K, D], from the proposals in their order: B <- β B + (1 - β) proposal."""

    def turn(bridge: Array, proposal: Array) -> tuple[jax.Array, jax.Array]:
        bridge = svgt.momentum * bridge + (1 - svgt.momentum) * proposal
        return bridge, bridge

    _, later = jax.lax.scan(turn, made[:, 0], made[:, 1:].swapaxes(0, 1))
    return jnp.concatenate([made[:, :1], later.swapaxes(0, 1)], axis=1)


@dataclass(frozen=True)
class Layout:
    """Where prompt, bridges and reply stand in the layers above l*: each bridge before the tokens that see it.

    order    [Q] where each slot is taken from: below P + T the row of prompt and reply, then bridge by bridge
    version  [Q] 1 + v for the slots of bridge v, else 0
    sees     [Q] the version that a slot sees
    read     [T] the slot from whose state each token of the reply is predicted
    """

    order: np.ndarray
    version: np.ndarray
    sees: np.ndarray
    read: np.ndarray

    @classmethod
    def of(cls, prompt: int, reply: int, width: int, starts: Sequence[int]) -> Layout:
        """For bridges of `width` slots, bridge v in force from reply token `starts[v]` on (0 is before the first).

        >>> Layout.of(2, 3, 1, (0, 2)).order.tolist()             # prompt, bridge 0, token 1, bridge 1, tokens 2 and 3
        [0, 1, 5, 2, 6, 3, 4]
        """
        order, version, sees = list(range(prompt)), [0] * prompt, [0] * prompt
        place = {}
        for v, (begin, end) in enumerate(zip(starts, [*starts[1:], reply + 1])):
            order += range(prompt + reply + v * width, prompt + reply + (v + 1) * width)
            version += [v + 1] * width
            if v == 0:
                place[0] = len(order) - 1  # the first token is read from the bridge's last slot
            for token in range(max(begin, 1), end):
                place[token] = len(order)
                order.append(prompt + token - 1)
                version.append(0)
            sees += [v + 1] * (len(order) - len(sees))
        return cls(*(np.asarray(a, np.int32) for a in (order, version, sees, [place[token] for token in range(reply)])))


def schedule(svgt: Svgt, reply: int) -> tuple[int, ...]:
    """The reply's tokens that are triggers while it is written, 0 the last prompt position: 0, R, 2R, …"""
    return tuple(range(0, max(reply, 1), svgt.refresh_every))
