"""The only place where a backbone meets adapters: segments of layers between boundaries.

    model = Model(spec, (cal,))
    params = {"backbone": backbone, "adapters": model.init_adapters(key)}
    logits = model.logits(params, batch)                      # [B, T, V] float32

Training differentiates `params["adapters"]` alone; layers below `model.first_boundary` are then plain arithmetic, whose
result `prefix` computes once and without residuals.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax import guidance
from calyrex_jax.adapters.api import Adapter, LayerAdapter, Site, boundary_key
from calyrex_jax.adapters.svgt import Svgt
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.cache import Cache, extend, init_cache
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.lowrank import Deltas
from calyrex_jax.core.numerics import settle
from calyrex_jax.core.types import Array, Batch, Tree


@flax.struct.dataclass
class DecodeState:
    """What decoding carries from token to token.

    cache      the backbone's keys and values
    adapters   {name: {boundary_26: state}}
    position   [B] int32, the position of each row's next token
    total      [B] int32, prompt, bridge and new tokens together: the length that fixes a dynamic rotary base
    guide      with SVGT, what guided decoding carries
    """

    cache: Cache
    adapters: Tree
    position: Array
    total: Array
    guide: guidance.Guide | None = None


@dataclass(frozen=True)
class Model:
    """A decoder and the adapters on its residual stream; all methods are pure functions of `params`.

    svgt  guides generation (`prefill`, `decode`); whole sequences (`hidden`) are not guided. Its leaves are
          params["adapters"]["svgt"]
    remat  training computes each layer anew in the backward pass: less memory, more time
    attention  what may compute attention in whole sequences and prompts, of `backbones.kernels.NAMES`
    """

    spec: DecoderSpec
    adapters: tuple[Adapter, ...] = ()
    svgt: Svgt | None = None
    remat: bool = False
    attention: str = "auto"

    @property
    def parts(self) -> tuple[Adapter | Svgt, ...]:
        """All that is trained."""
        return self.adapters if self.svgt is None else (*self.adapters, self.svgt)

    @property
    def boundaries(self) -> tuple[int, ...]:
        return tuple(sorted({b for adapter in self.adapters for b in adapter.boundaries}))

    @property
    def lora(self) -> LayerAdapter | None:
        """The adapter that works within layers, where there is one."""
        return next((adapter for adapter in self.adapters if isinstance(adapter, LayerAdapter)), None)

    @property
    def dropout(self) -> bool:
        """Whether training needs a key."""
        return self.lora is not None and self.lora.dropout > 0

    @property
    def stops(self) -> tuple[int, ...]:
        """Where the walk through the layers halts: boundaries with blocks, and the ends of what `lora` changes."""
        ends = () if self.lora is None else (self.lora.layers.start, self.lora.layers.stop)
        return tuple(sorted({*self.boundaries, *ends}))

    @property
    def bridge_slots(self) -> int:
        """Slots and positions that generation needs beside prompt and reply."""
        return 0 if self.svgt is None else self.svgt.slots

    @property
    def first_boundary(self) -> int:
        """The first boundary behind which anything is trained; L where nothing is."""
        guided = () if self.svgt is None else (self.svgt.boundary,)
        return min((*self.stops, *guided), default=self.spec.num_layers)

    def init_adapters(self, key: jax.Array) -> Tree:
        """Fresh trainable parameters {name: {boundary_26: {leaf: array}}}; without SVGT the adapted model equals the backbone."""
        keys = jax.random.split(key, max(len(self.parts), 1))
        return {part.name: part.init(k) for part, k in zip(self.parts, keys)}

    def prefix(self, backbone: Tree, batch: Batch, start: int = 0) -> jax.Array:
        """Hidden states at the first boundary, [B, T, D]: a function of the frozen backbone alone.

        From batch.prefix, the states at boundary `start`, where that is above 0.
        """
        context = decoder.make_context(self.spec, batch.positions, batch.segments)
        if start:
            x = jnp.asarray(batch.prefix, decoder.stream_dtype(backbone))
        else:
            x = decoder.embed(self.spec, backbone, batch.tokens, batch.positions)
        return self._run(backbone, x, context=context, start=start, stop=self.first_boundary)[0]

    def hidden(self, params: Tree, batch: Batch, prefix: Array | None = None, key: Array | None = None) -> jax.Array:
        """States after the final norm, [B, T, D]; `prefix` spares the layers below the first boundary, `key` is dropout's."""
        backbone = params["backbone"]
        x = self.prefix(backbone, batch) if prefix is None else jnp.asarray(prefix, decoder.stream_dtype(backbone))
        stream = self._stream(params, x, batch)
        x, _ = self._walk(
            params, stream, self.first_boundary, self.spec.num_layers, _apply, deltas=self._deltas(params, key)
        )
        return decoder.final_norm(self.spec, backbone, x)

    def frozen(self, backbone: Tree, batch: Batch, prefix: Array) -> jax.Array:
        """What `hidden` gives without any adapter, [B, T, D], from the states at the first boundary on."""
        x = jnp.asarray(prefix, decoder.stream_dtype(backbone))
        context = decoder.make_context(self.spec, batch.positions, batch.segments)
        x, _ = self._run(backbone, x, context=context, start=self.first_boundary, stop=self.spec.num_layers)
        return decoder.final_norm(self.spec, backbone, x)

    def logits(self, params: Tree, batch: Batch) -> jax.Array:
        """Next-token logits [B, T, V] float32. For whole corpora use training.losses, which never holds them at once."""
        return decoder.logits(self.spec, params["backbone"], self.hidden(params, batch))

    def prefill_prefix(self, backbone: Tree, batch: Batch, capacity: int, new_tokens: int) -> tuple[jax.Array, Cache]:
        """The part of `prefill` below the first boundary, which all adapters at these boundaries share."""
        context = decoder.make_context(self.spec, batch.positions, batch.segments, self._total(batch, new_tokens))
        cache = init_cache(self.spec, batch.tokens.shape[0], capacity, decoder.stream_dtype(backbone))
        cache = extend(cache, batch.positions, batch.segments)
        x = decoder.embed(self.spec, backbone, batch.tokens, batch.positions)
        return self._run(backbone, x, context=context, start=0, stop=self.first_boundary, cache=cache, fill=True)

    def prefill(
        self, params: Tree, batch: Batch, capacity: int, new_tokens: int, prefix: tuple[Array, Cache] | None = None
    ) -> tuple[jax.Array, DecodeState]:
        """Reads left-padded prompts: the state [B, D] that the reply's first token is read from, and what to decode from.

        `capacity` slots must hold the padded prompt, `bridge_slots` and `new_tokens` (the caller checks: a jitted write would
        clamp); `prefix` is what `prefill_prefix` gave for the same arguments.
        """
        backbone = params["backbone"]
        x, cache = self.prefill_prefix(backbone, batch, capacity, new_tokens) if prefix is None else prefix
        total = self._total(batch, new_tokens)
        states: Tree = {adapter.name: {} for adapter in self.adapters}

        def block(adapter: Adapter, leaves: Tree, site: Site) -> jax.Array:
            x, states[adapter.name][boundary_key(site.boundary)] = adapter.prefill(leaves, site, capacity)
            return x

        stream, layer, guide = self._stream(params, x, batch, total), self.first_boundary, None
        deltas = self._deltas(params)
        if self.svgt is not None:
            x, cache = self._walk(params, stream, layer, self.svgt.boundary, block, cache, True, deltas)
            guide = guidance.begin(self.svgt, params["adapters"]["svgt"], x, batch.segments, new_tokens)
            stream, layer = stream.replace(x=x), self.svgt.boundary
            if self.svgt.injects:
                stream = stream.replace(x=x.at[:, -1].add(guide.bridge[:, 0].astype(x.dtype)))
            else:
                cache = extend(cache, guide.positions, jnp.ones_like(guide.positions)).replace(start=cache.start)
                stream = self._with_bridge(stream, guide, total, behind=True)
        x, cache = self._walk(params, stream, layer, self.spec.num_layers, block, cache, True, deltas)
        x = decoder.final_norm(self.spec, backbone, x[:, -1:])[:, 0]
        position = batch.segments.astype(bool).sum(-1).astype(jnp.int32) + self.bridge_slots
        return x, DecodeState(cache=cache, adapters=states, position=position, total=total, guide=guide)

    def decode(
        self, params: Tree, tokens: Array, state: DecodeState, refresh: bool = False
    ) -> tuple[jax.Array, DecodeState]:
        """One token a row, [B] int32: its final state [B, D] and the next state.

        refresh  with SVGT, on every R-th token: the bridge is made anew, in the same pass through the upper layers
        """
        positions = state.position[:, None]
        segments = jnp.ones_like(positions)
        cache = extend(state.cache, positions, segments)
        context = decoder.make_context(self.spec, positions, segments, state.total)
        x = decoder.embed(self.spec, params["backbone"], tokens[:, None], positions)
        states: Tree = {adapter.name: {} for adapter in self.adapters}

        def block(adapter: Adapter, leaves: Tree, site: Site) -> jax.Array:
            key = boundary_key(site.boundary)
            x, states[adapter.name][key] = adapter.decode(leaves, site, state.adapters[adapter.name][key])
            return x

        outputs = decoder.head_rows(params["backbone"], tokens[:, None])
        stream = _Stream(x, outputs, context, jnp.zeros((tokens.shape[0], 0), jnp.int32))
        layer, guide, deltas = 0, state.guide, self._deltas(params)
        if self.svgt is not None:
            below = guidance.without_bridge(self.svgt, cache, guide)
            x, below = self._walk(params, stream, layer, self.svgt.boundary, block, below, False, deltas)
            cache, stream, layer = cache.replace(k=below.k, v=below.v), stream.replace(x=x), self.svgt.boundary
            guide = guidance.remember(guide, x)
            if refresh:
                guide = guidance.refresh(self.svgt, params["adapters"]["svgt"], guide)
            if self.svgt.injects:
                stream = stream.replace(x=x + guide.bridge.astype(x.dtype))
            elif refresh:
                stream = self._with_bridge(stream, guide, state.total, behind=False)
                cache = cache.replace(aside=guide.slot)
        x, cache = self._walk(params, stream, layer, self.spec.num_layers, block, cache, False, deltas)
        x = decoder.final_norm(self.spec, params["backbone"], x[:, -1:])[:, 0]
        cache = cache.replace(aside=None)
        return x, state.replace(cache=cache, adapters=states, position=state.position + 1, guide=guide)

    def below(self, params: Tree, dialogue: guidance.Dialogue) -> jax.Array:
        """States [B, P + T, D] at boundary l* + 1 of prompts and replies, without bridge slots but with their positions."""
        stream = self._dialogue_stream(params, dialogue)
        return self._walk(params, stream, 0, self.svgt.boundary, _apply, deltas=self._deltas(params))[0]

    def judged(self, params: Tree, dialogue: guidance.Dialogue) -> tuple[jax.Array, guidance.Judged]:
        """`below`, and what the value space makes of it."""
        x = self.below(params, dialogue)
        return x, guidance.judge(self.svgt, params["adapters"]["svgt"]["value_space"], x, dialogue)

    def guided(self, params: Tree, dialogue: guidance.Dialogue) -> tuple[jax.Array, guidance.Judged]:
        """What `prefill` and `decode` compute while they write just these replies, in one pass.

        Returns the final states [B, T, D] from which the reply's tokens are predicted, and what the value space saw.
        """
        x, judged = self.judged(params, dialogue)
        starts = guidance.schedule(self.svgt, dialogue.reply.shape[1])
        triggers = jnp.broadcast_to(jnp.asarray(starts, jnp.int32), (x.shape[0], len(starts)))
        made = guidance.proposals(self.svgt, params["adapters"]["svgt"]["bridge"], judged, triggers)
        _, final = self.above(params, dialogue, x, guidance.averaged(self.svgt, made), starts)
        return final, judged

    def above(
        self, params: Tree, dialogue: guidance.Dialogue, x: Array, bridges: Array, starts: tuple[int, ...]
    ) -> tuple[jax.Array, jax.Array]:
        """The layers above l*, with bridges [B, V, K, D], bridge v in force from reply token starts[v] on.

        x  [B, P + T, D] at boundary l* + 1
        Returns the states at boundary l* + 2 in x's layout, [B, P + T, D], and the final states [B, T, D] from which the
        reply's tokens are predicted.
        """
        stream, width = self._dialogue_stream(params, dialogue), self.svgt.slots
        rows, versions, _, size = bridges.shape
        prompt, reply = dialogue.prompt.shape[1], dialogue.reply.shape[1]
        layout = guidance.Layout.of(prompt, reply, width, starts)
        first = dialogue.prompt_mask.sum(-1)[:, None]
        spots = jnp.tile(jnp.arange(width, dtype=jnp.int32), versions)[None]

        def ordered(own: Array, bridge: Array) -> jax.Array:
            return jnp.concatenate([own, bridge], axis=1)[:, layout.order]

        made = settle(bridges.astype(x.dtype))
        flat = made[:, :, :width].reshape(rows, versions * width, size)
        positions = ordered(stream.context.positions, first + spots)
        segments = ordered(stream.context.segments, jnp.ones_like(first + spots))
        context = decoder.make_context(self.spec, positions, segments, self._dialogue_total(dialogue))
        version, sees = (jnp.broadcast_to(a, positions.shape) for a in (layout.version, layout.sees))
        context = context.replace(version=version, sees=sees)
        x = ordered(x, flat)
        if self.svgt.injects:  # into the last prompt position, from which the first token is read, and into the reply's
            at = np.where(np.arange(len(layout.sees)) == prompt - 1, 1, layout.sees)
            x = x + jnp.where((at > 0)[None, :, None], made[:, np.maximum(at - 1, 0), 0], 0)
        stream = _Stream(x, ordered(stream.outputs, jnp.zeros_like(flat)), context, stream.span)
        walk = functools.partial(self._walk, params, block=_apply, deltas=self._deltas(params))
        boundary = self.svgt.boundary
        higher, _ = walk(stream, start=boundary, stop=boundary + 1)
        final, _ = walk(stream.replace(x=higher), start=boundary + 1, stop=self.spec.num_layers)
        final = decoder.final_norm(self.spec, params["backbone"], final[:, layout.read])
        own = np.argsort(layout.order)[: prompt + reply]  # where each slot of x went
        return higher[:, own], final

    def _dialogue_stream(self, params: Tree, dialogue: guidance.Dialogue) -> _Stream:
        batch = dialogue.batch(self.bridge_slots)
        x = decoder.embed(self.spec, params["backbone"], batch.tokens, batch.positions)
        stream = self._stream(params, x, batch, self._dialogue_total(dialogue))
        return stream.replace(context=stream.context.replace(gaps=self.bridge_slots > 0))

    def _dialogue_total(self, dialogue: guidance.Dialogue) -> jax.Array:
        return (dialogue.prompt_mask.sum(-1) + dialogue.reply_mask.sum(-1) + self.bridge_slots).astype(jnp.int32)

    def _stream(self, params: Tree, x: Array, batch: Batch, total: Array | None = None) -> _Stream:
        context = decoder.make_context(self.spec, batch.positions, batch.segments, total)
        return _Stream(x, decoder.head_rows(params["backbone"], batch.tokens), context, batch.span)

    def _with_bridge(self, stream: _Stream, guide: guidance.Guide, total: Array, behind: bool) -> _Stream:
        """The stream with the bridge's slots behind the prompt, or before a reply's token."""

        def join(mine: Array, bridge: Array) -> jax.Array:
            return jnp.concatenate([mine, bridge] if behind else [bridge, mine], axis=1)

        positions = join(stream.context.positions, guide.positions)
        segments = join(stream.context.segments, jnp.ones_like(guide.positions))
        return _Stream(
            join(stream.x, settle(guide.bridge.astype(stream.x.dtype))),
            join(stream.outputs, jnp.zeros_like(guide.bridge, stream.outputs.dtype)),  # no token, so no row of the head
            decoder.make_context(self.spec, positions, segments, total),
            stream.span,
        )

    def _walk(
        self,
        params: Tree,
        stream: _Stream,
        start: int,
        stop: int,
        block: Callable[[Adapter, Tree, Site], jax.Array],
        cache: Cache | None = None,
        fill: bool = False,
        deltas: Deltas | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """From boundary `start` to `stop`, through the layers and, before the layer behind each, the adapters' blocks.

        What stands at `stop` itself belongs to the next walk, unless no layer is left.
        """
        x, layer, context = stream.x, start, stream.context
        run = functools.partial(self._run, params["backbone"], context=context, remat=self.remat)
        last = self.spec.num_layers
        for boundary in (b for b in self.stops if start <= b < stop or b == stop == last):
            x, cache = run(x, start=layer, stop=boundary, cache=cache, fill=fill, deltas=deltas)
            site = Site(x, stream.outputs, context.positions, context.segments, stream.span, boundary)
            for adapter in (adapter for adapter in self.adapters if boundary in adapter.boundaries):
                leaves = params["adapters"][adapter.name][boundary_key(boundary)]
                site = site.replace(x=block(adapter, leaves, site))
            x, layer = site.x, boundary
        return run(x, start=layer, stop=stop, cache=cache, fill=fill, deltas=deltas)

    def _run(self, backbone: Tree, x: Array, **how: Any) -> tuple[jax.Array, Cache | None]:
        """`decoder.run_layers` of this backbone."""
        return decoder.run_layers(self.spec, backbone["layers"], x, attention=self.attention, **how)

    def _total(self, batch: Batch, new_tokens: int) -> jax.Array:
        """[B] int32: how many positions each row will have taken in the end."""
        return batch.segments.astype(bool).sum(-1).astype(jnp.int32) + self.bridge_slots + new_tokens

    def _deltas(self, params: Tree, key: Array | None = None) -> Deltas | None:
        return None if self.lora is None else self.lora.deltas(params["adapters"][self.lora.name], key)


@flax.struct.dataclass
class _Stream:
    """The residual stream on its way: x and outputs [B, T, D] (api.Site), its positions, and the span's slots [B, S]."""

    x: Array
    outputs: Array
    context: decoder.Context
    span: Array


def _apply(adapter: Adapter, leaves: Tree, site: Site) -> jax.Array:
    return adapter.apply(leaves, site)
