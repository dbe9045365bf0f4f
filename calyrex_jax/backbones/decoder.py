"""The decoder: stacked layers run by one scan between any two boundaries."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from calyrex_jax.backbones.attention import Attention, Context, attend_in_chunks, visible
from calyrex_jax.backbones.cache import Cache
from calyrex_jax.backbones.layers import Mlp, Norm, norm
from calyrex_jax.backbones.rope import phases
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.types import Tree

__all__ = [
    "Context",
    "DecoderLayer",
    "abstract_params",
    "embed",
    "final_norm",
    "head_matrix",
    "init_params",
    "logits",
    "make_context",
    "run_layers",
]


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention, then the mlp, each added to the residual stream."""

    spec: DecoderSpec

    @nn.compact
    def __call__(self, x: jax.Array, context: Context, layer: jax.Array | int, attention: Callable) -> tuple:
        """x [B, T, D] -> (x [B, T, D], the state that `attention` hands back)."""
        attended, state = Attention(self.spec, name="attn")(Norm(self.spec, name="attn_norm")(x), context, layer, attention)
        x = x + attended
        return x + Mlp(self.spec, name="mlp")(Norm(self.spec, name="mlp_norm")(x)), state


def init_params(spec: DecoderSpec, key: jax.Array, dtype: jax.typing.DTypeLike) -> Tree:
    """A random backbone, for tests and benchmarks: normal(0, 0.02) matrices, the tree as the weights' loader builds it."""
    keys = jax.random.split(key, 4)
    normal = nn.initializers.normal(0.02)
    x = jnp.zeros((1, 1, spec.embed_dim), dtype)
    context = make_context(spec, jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32))

    def layer(key: jax.Array) -> Tree:
        return DecoderLayer(spec).init(key, x, context, 0, lambda q, k, v: (q, None))["params"]

    tree = {
        "embed": {"tokens": normal(keys[0], (spec.vocab_size, spec.embed_dim), dtype)},
        "layers": jax.vmap(layer)(jax.random.split(keys[1], spec.num_layers)),
        "final_norm": Norm(spec).init(keys[2], x)["params"],
    }
    if spec.learned_positions:
        tree["embed"]["positions"] = normal(keys[2], (spec.max_positions, spec.embed_dim), dtype)
    if not spec.tied:
        tree["head"] = {"w": normal(keys[3], (spec.vocab_size, spec.embed_dim), dtype)}
    return tree


def abstract_params(spec: DecoderSpec, dtype: jax.typing.DTypeLike) -> Tree:
    """The backbone's tree as jax.ShapeDtypeStruct leaves; allocates nothing."""
    return jax.eval_shape(lambda key: init_params(spec, key, dtype), jax.random.key(0))


def embed(spec: DecoderSpec, backbone: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Token embeddings, plus learned positions where the backbone has them: [B, T] int32 each -> x [B, T, D].

    Ids and positions beyond the tables are clipped: `check_tokens` and `check_length` refuse them on the host.
    """
    x = jnp.take(backbone["embed"]["tokens"], tokens, axis=0, mode="clip")
    if spec.learned_positions:
        x = x + jnp.take(backbone["embed"]["positions"], positions, axis=0, mode="clip")
    return x


def make_context(
    spec: DecoderSpec, positions: jax.Array, segments: jax.Array, total_lengths: jax.Array | None = None
) -> Context:
    """What the layers share, built once a forward from positions and segments, [B, T] int32 each.

    total_lengths [B] int32 fixes the base of dynamic scaling for each row: prompt plus all tokens to come. Without it each
    segment's own length does, which is what transformers computes for a full forward.
    """
    if spec.rope is None:
        return Context(positions, segments)
    lengths = None
    if spec.rope.kind == "dynamic":
        lengths = _segment_lengths(positions, segments) if total_lengths is None else total_lengths[:, None]
    return Context(positions, segments, *phases(spec.rope, spec.head_dim, positions, lengths))


def _segment_lengths(positions: jax.Array, segments: jax.Array) -> jax.Array:
    """[B, T]: for every token the largest position of its segment, plus one."""
    same = segments[:, :, None] == segments[:, None, :]
    return jnp.max(jnp.where(same, positions[:, None, :], 0), axis=-1) + 1


def run_layers(
    spec: DecoderSpec,
    layers: Tree,
    x: jax.Array,
    context: Context,
    start: int,
    stop: int,
    cache: Cache | None = None,
    fill: bool = False,
) -> tuple[jax.Array, Cache | None]:
    """Runs layers start … stop - 1 on x [B, T, D]; start == stop returns x.

    layers is the whole stack: each layer is taken from it inside the scan, since a slice taken outside would be a copy.
    Without a cache the T tokens attend to each other. With one, `extend`ed for them beforehand, their keys and values
    are written to it; they attend to each other alone where `fill` (the cache was empty), else to all of it.
    """
    if start == stop:
        return x, cache
    keys = context if cache is None or fill else cache
    windows = spec.windows[start:stop]
    shared = windows[0] if len(set(windows)) == 1 else -1
    # one mask serves all layers unless their windows differ; the largest int32 stands for "no window"
    limits = jnp.asarray([2**31 - 1 if window is None else window for window in spec.windows], jnp.int32)

    def body(carry, layer):
        x, k_all, v_all = carry
        window = shared if shared != -1 else limits[layer]
        mask_of = functools.partial(_mask, keys=keys, window=window)

        def attention(q, k, v):
            if cache is None:
                return attend_in_chunks(q, k, v, mask_of, context), (None, None)
            new = tuple(_write(buffer, values, layer, cache.start) for buffer, values in ((k_all, k), (v_all, v)))
            if not fill:
                k, v = (jax.lax.dynamic_index_in_dim(buffer, layer, keepdims=False) for buffer in new)
            return attend_in_chunks(q, k, v, mask_of, context), new

        params = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False), layers)
        x, new = DecoderLayer(spec).apply({"params": params}, x, context, layer, attention)
        return (x, *new), None

    carry = (x, None, None) if cache is None else (x, cache.k, cache.v)
    (x, k_all, v_all), _ = jax.lax.scan(body, carry, jnp.arange(start, stop, dtype=jnp.int32))
    return x, cache if cache is None else cache.replace(k=k_all, v=v_all)


def _mask(positions: jax.Array, segments: jax.Array, keys: Context | Cache, window: jax.Array | int | None) -> jax.Array:
    return visible(positions, segments, keys.positions, keys.segments, window)


def _write(buffer: jax.Array, values: jax.Array, layer: jax.Array, slot: jax.Array) -> jax.Array:
    """Puts [B, T, K, H] into the buffer [L, B, C, K, H] at one layer and slot; in place, as the scan owns the buffer."""
    return jax.lax.dynamic_update_slice(buffer, values[None].astype(buffer.dtype), (layer, 0, slot, 0, 0))


def final_norm(spec: DecoderSpec, backbone: Tree, x: jax.Array) -> jax.Array:
    """The norm before the head."""
    return norm(spec, x, backbone["final_norm"]["scale"], backbone["final_norm"].get("bias"))


def head_matrix(backbone: Tree) -> jax.Array:
    """[V, D]: the head's own matrix, or the embedding where tied."""
    return backbone["head"]["w"] if "head" in backbone else backbone["embed"]["tokens"]


def logits(spec: DecoderSpec, backbone: Tree, x: jax.Array) -> jax.Array:
    """Float32 logits over all rows of the embedding, [..., D] -> [..., V]; x after the final norm."""
    return jnp.einsum("...d,vd->...v", x, head_matrix(backbone), preferred_element_type=jnp.float32)
