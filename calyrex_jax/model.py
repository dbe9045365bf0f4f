"""The only place where a backbone meets adapters: segments of layers between boundaries.

    model = Model(spec, (cal,))
    params = {"backbone": backbone, "adapters": model.init_adapters(key)}
    logits = model.logits(params, batch)                      # [B, T, V] float32

Training differentiates `params["adapters"]` alone; layers below `model.first_boundary` are then plain arithmetic, whose
result `prefix` computes once and without residuals.
"""

from __future__ import annotations

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from calyrex_jax.adapters.api import Adapter, LayerAdapter, Site, boundary_key
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.cache import Cache, extend, init_cache
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.lowrank import Deltas
from calyrex_jax.core.types import Array, Batch, Tree


@flax.struct.dataclass
class DecodeState:
    """What decoding carries from token to token.

    cache      the backbone's keys and values
    adapters   {name: {boundary_26: state}}
    position   [B] int32, the position of each row's next token
    total      [B] int32, prompt and new tokens together: the length that fixes a dynamic rotary base
    """

    cache: Cache
    adapters: Tree
    position: Array
    total: Array


@dataclass(frozen=True)
class Model:
    """A decoder and the adapters on its residual stream; all methods are pure functions of `params`."""

    spec: DecoderSpec
    adapters: tuple[Adapter, ...] = ()

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
    def first_boundary(self) -> int:
        """The first boundary behind which anything is trained; L where nothing is."""
        return min(self.stops, default=self.spec.num_layers)

    def init_adapters(self, key: jax.Array) -> Tree:
        """Fresh trainable parameters {name: {boundary_26: {leaf: array}}}; the adapted model equals the backbone."""
        keys = jax.random.split(key, max(len(self.adapters), 1))
        return {adapter.name: adapter.init(k) for adapter, k in zip(self.adapters, keys)}

    def prefix(self, backbone: Tree, batch: Batch, start: int = 0) -> jax.Array:
        """Hidden states at the first boundary, [B, T, D]: a function of the frozen backbone alone.

        From batch.prefix, the states at boundary `start`, where that is above 0.
        """
        context = decoder.make_context(self.spec, batch.positions, batch.segments)
        if start:
            x = jnp.asarray(batch.prefix, backbone["embed"]["tokens"].dtype)
        else:
            x = decoder.embed(self.spec, backbone, batch.tokens, batch.positions)
        return decoder.run_layers(self.spec, backbone["layers"], x, context, start, self.first_boundary)[0]

    def hidden(self, params: Tree, batch: Batch, prefix: Array | None = None, key: Array | None = None) -> jax.Array:
        """States after the final norm, [B, T, D]; `prefix` spares the layers below the first boundary, `key` is dropout's."""
        backbone = params["backbone"]
        x = self.prefix(backbone, batch) if prefix is None else jnp.asarray(prefix, backbone["embed"]["tokens"].dtype)
        context = decoder.make_context(self.spec, batch.positions, batch.segments)
        deltas = self._deltas(params, key)
        layer, outputs = self.first_boundary, decoder.head_rows(backbone, batch.tokens)
        for boundary in self.stops:
            x, _ = decoder.run_layers(self.spec, backbone["layers"], x, context, layer, boundary, deltas=deltas)
            site = Site(x, outputs, batch.positions, batch.segments, batch.span, boundary)
            for adapter, leaves in self._at(params["adapters"], boundary):
                site = site.replace(x=adapter.apply(leaves, site))
            x, layer = site.x, boundary
        x, _ = decoder.run_layers(self.spec, backbone["layers"], x, context, layer, self.spec.num_layers, deltas=deltas)
        return decoder.final_norm(self.spec, backbone, x)

    def frozen(self, backbone: Tree, batch: Batch, prefix: Array) -> jax.Array:
        """What `hidden` gives without any adapter, [B, T, D], from the states at the first boundary on."""
        x = jnp.asarray(prefix, backbone["embed"]["tokens"].dtype)
        context = decoder.make_context(self.spec, batch.positions, batch.segments)
        x, _ = decoder.run_layers(self.spec, backbone["layers"], x, context, self.first_boundary, self.spec.num_layers)
        return decoder.final_norm(self.spec, backbone, x)

    def logits(self, params: Tree, batch: Batch) -> jax.Array:
        """Next-token logits [B, T, V] float32. For whole corpora use training.losses, which never holds them at once."""
        return decoder.logits(self.spec, params["backbone"], self.hidden(params, batch))

    def prefill_prefix(self, backbone: Tree, batch: Batch, capacity: int, new_tokens: int) -> tuple[jax.Array, Cache]:
        """The part of `prefill` below the first boundary, which all adapters at these boundaries share."""
        lengths = batch.segments.astype(bool).sum(-1).astype(jnp.int32)
        context = decoder.make_context(self.spec, batch.positions, batch.segments, lengths + new_tokens)
        cache = init_cache(self.spec, batch.tokens.shape[0], capacity, backbone["embed"]["tokens"].dtype)
        cache = extend(cache, batch.positions, batch.segments)
        x = decoder.embed(self.spec, backbone, batch.tokens, batch.positions)
        return decoder.run_layers(self.spec, backbone["layers"], x, context, 0, self.first_boundary, cache, fill=True)

    def prefill(
        self, params: Tree, batch: Batch, capacity: int, new_tokens: int, prefix: tuple[Array, Cache] | None = None
    ) -> tuple[jax.Array, DecodeState]:
        """Reads left-padded prompts: the last token's final state [B, D] and the state to decode from.

        `capacity` slots must hold the padded prompt and `new_tokens` (the caller checks: a jitted write would clamp);
        `prefix` is what `prefill_prefix` gave for the same arguments.
        """
        backbone = params["backbone"]
        x, cache = self.prefill_prefix(backbone, batch, capacity, new_tokens) if prefix is None else prefix
        lengths = batch.segments.astype(bool).sum(-1).astype(jnp.int32)
        total = lengths + new_tokens
        context = decoder.make_context(self.spec, batch.positions, batch.segments, total)
        states: Tree = {adapter.name: {} for adapter in self.adapters}
        layer, outputs = self.first_boundary, decoder.head_rows(backbone, batch.tokens)
        deltas = self._deltas(params)
        for boundary in self.stops:
            x, cache = decoder.run_layers(
                self.spec, backbone["layers"], x, context, layer, boundary, cache, fill=True, deltas=deltas
            )
            site = Site(x, outputs, batch.positions, batch.segments, batch.span, boundary)
            for adapter, leaves in self._at(params["adapters"], boundary):
                x, state = adapter.prefill(leaves, site, capacity)
                states[adapter.name][boundary_key(boundary)] = state
                site = site.replace(x=x)
            x, layer = site.x, boundary
        # the remaining layers, and the final norm for the one state that is read
        x, cache = decoder.run_layers(
            self.spec, backbone["layers"], x, context, layer, self.spec.num_layers, cache, fill=True, deltas=deltas
        )
        x = decoder.final_norm(self.spec, backbone, x[:, -1:])[:, 0]
        return x, DecodeState(cache=cache, adapters=states, position=lengths, total=total)

    def decode(self, params: Tree, tokens: Array, state: DecodeState) -> tuple[jax.Array, DecodeState]:
        """One token a row, [B] int32: its final state [B, D] and the next state."""
        backbone = params["backbone"]
        positions = state.position[:, None]
        segments = jnp.ones_like(positions)
        cache = extend(state.cache, positions, segments)
        context = decoder.make_context(self.spec, positions, segments, state.total)
        x = decoder.embed(self.spec, backbone, tokens[:, None], positions)
        states: Tree = {adapter.name: {} for adapter in self.adapters}
        layer, outputs = 0, decoder.head_rows(backbone, tokens[:, None])
        deltas = self._deltas(params)
        no_span = jnp.zeros((tokens.shape[0], 0), jnp.int32)
        for boundary in self.stops:
            x, cache = decoder.run_layers(self.spec, backbone["layers"], x, context, layer, boundary, cache, deltas=deltas)
            site = Site(x, outputs, positions, segments, no_span, boundary)
            for adapter, leaves in self._at(params["adapters"], boundary):
                key = boundary_key(boundary)
                x, states[adapter.name][key] = adapter.decode(leaves, site, state.adapters[adapter.name][key])
                site = site.replace(x=x)
            x, layer = site.x, boundary
        x, cache = decoder.run_layers(
            self.spec, backbone["layers"], x, context, layer, self.spec.num_layers, cache, deltas=deltas
        )
        x = decoder.final_norm(self.spec, backbone, x)[:, 0]
        return x, state.replace(cache=cache, adapters=states, position=state.position + 1)

    def _deltas(self, params: Tree, key: Array | None = None) -> Deltas | None:
        return None if self.lora is None else self.lora.deltas(params["adapters"][self.lora.name], key)

    def _at(self, adapters: Tree, boundary: int):
        """The adapters with a block at `boundary`, in their given order, with its leaves."""
        for adapter in self.adapters:
            if boundary in adapter.boundaries:
                yield adapter, adapters[adapter.name][boundary_key(boundary)]
