"""The decoder: stacked layers run by one scan between any two boundaries."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from calyrex_jax.backbones import kernels
from calyrex_jax.backbones.attention import Attention, Context, Tokens, attend_tokens
from calyrex_jax.backbones.cache import Cache
from calyrex_jax.backbones.layers import Mlp, Norm, norm
from calyrex_jax.backbones.rope import phases
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.lowrank import Deltas, LayerDeltas
from calyrex_jax.core.numerics import platform, put, settle, stored, take_layer
from calyrex_jax.core.placing import by_rows, by_vocabulary, gathered, on_several
from calyrex_jax.core.quantized import decoded, is_quantized, table_logits, table_rows
from calyrex_jax.core.trees import flatten, map_with_path, unflatten
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
    "unstack",
]


_MIXED = -1  # no window is negative


class DecoderLayer(nn.Module):
    """One pre-norm layer: attention, then the mlp, each added to the residual stream."""

    spec: DecoderSpec

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        context: Context,
        layer: jax.Array | int,
        attention: Callable,
        deltas: LayerDeltas | None = None,
    ) -> tuple:
        """x [B, T, D] -> (x [B, T, D], the state that `attention` hands back)."""
        normed = Norm(self.spec, name="attn_norm")(x)
        attended, state = Attention(self.spec, name="attn")(normed, context, layer, attention, deltas)
        x = x + attended
        return x + Mlp(self.spec, name="mlp")(Norm(self.spec, name="mlp_norm")(x), deltas), state


def abstract_params(spec: DecoderSpec, dtype: jax.typing.DTypeLike) -> Tree:
    """The backbone's tree as jax.ShapeDtypeStruct leaves; allocates nothing."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    x, rows = leaf(1, 1, spec.embed_dim), jax.ShapeDtypeStruct((1, 1), jnp.int32)
    context = jax.eval_shape(functools.partial(make_context, spec), rows, rows)
    layer = jax.eval_shape(
        lambda x, context: DecoderLayer(spec).init(jax.random.key(0), x, context, 0, lambda q, k, v: (q, None)), x, context
    )["params"]
    tree = {
        "embed": {"tokens": leaf(spec.vocab_size, spec.embed_dim)},
        "layers": jax.tree.map(lambda one: leaf(spec.num_layers, *one.shape), layer),
        "final_norm": jax.eval_shape(Norm(spec).init, jax.random.key(0), x)["params"],
    }
    if spec.learned_positions:
        tree["embed"]["positions"] = leaf(spec.max_positions, spec.embed_dim)
    if not spec.tied:
        tree["head"] = {"w": leaf(spec.vocab_size, spec.embed_dim)}
    return tree


@functools.partial(jax.jit, static_argnames=("spec", "dtype"))
def init_params(spec: DecoderSpec, key: jax.Array, dtype: jax.typing.DTypeLike) -> Tree:
    """A random backbone, for tests and benchmarks: normal(0, 0.02) but for norms, which start as the identity."""
    leaves = flatten(abstract_params(spec, dtype))
    drawn = [path for path in leaves if "norm" not in path]
    # one draw, cut up: a generator for every leaf would take seconds to compile
    ends = np.cumsum([leaves[path].size for path in drawn])
    parts = jnp.split(0.02 * jax.random.normal(key, (int(ends[-1]),), dtype), ends[:-1])
    made = {path: part.reshape(leaves[path].shape) for path, part in zip(drawn, parts, strict=True)}
    for path in leaves.keys() - made.keys():
        made[path] = jnp.full(leaves[path].shape, path.endswith("scale"), dtype)
    return unflatten(made)


def embed(spec: DecoderSpec, backbone: Tree, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    """Token embeddings, plus learned positions where the backbone has them: [B, T] int32 each -> x [B, T, D].

    Ids and positions beyond the tables are clipped: `check_tokens` and `check_length` refuse them on the host.
    """
    x = table_rows(backbone["embed"]["tokens"], tokens, stream_dtype(backbone))
    if spec.learned_positions:
        x = settle(x + jnp.take(backbone["embed"]["positions"], positions, axis=0, mode="clip"))
    return by_rows(x)


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


def unstack(layers: Tree) -> tuple[Tree, ...]:
    """The stack cut into one tree a layer, for decoding on CPUs: twice the memory while both exist.

    XLA's CPU backend copies a layer out of the stack before it multiplies by it, which is as much traffic again as the
    product of one token; separate layers halve a step (SmolLM2-135M, float32, batch 1). Accelerators fuse the copy away.
    """
    count = jax.tree.leaves(layers)[0].shape[0]
    layers = jax.tree.map(stored, layers)
    return tuple(jax.tree.map(functools.partial(take_layer, layer=layer), layers) for layer in range(count))


def run_layers(
    spec: DecoderSpec,
    layers: Tree | tuple[Tree, ...],
    x: jax.Array,
    context: Context,
    start: int,
    stop: int,
    cache: Cache | None = None,
    fill: bool = False,
    deltas: Deltas | None = None,
    remat: bool = False,
    attention: str = "xla",
) -> tuple[jax.Array, Cache | None]:
    """Runs layers start … stop - 1 on x [B, T, D]; start == stop returns x.

    layers is the whole stack: each layer is taken from it inside the scan, since a slice taken outside would be a copy.
    Or it is what `unstack` gives; then the layers are unrolled.
    Without a cache the T tokens attend to each other. With one, `extend`ed for them beforehand, their keys and values
    are written to it; they attend to each other alone where `fill` (the cache was empty), else to all of it.
    Within a segment of x, positions must rise from slot to slot.
    deltas change linear maps of all these layers or of none of them.
    remat: the backward pass computes a layer anew from its input alone, instead of keeping its matrix products.
    attention: one of `kernels.NAMES`: what may compute the attention of tokens among themselves.
    """
    if start == stop:
        return x, cache
    deltas = None if deltas is None else deltas.within(start, stop)
    changes = (lambda *_: None) if deltas is None else deltas.at
    windows = frozenset(spec.windows[start:stop])
    step = _stepper(spec, x.dtype, context, cache, fill, windows, attention)
    policy = None if remat else _products
    carry = (x, None, None) if cache is None else (x, cache.k, cache.v)
    if isinstance(layers, tuple):
        for layer in range(start, stop):
            carry = step(carry, layer, layers[layer], changes(layer))
    elif stop - start == 1:
        # XLA would unroll a loop of one step, then merge what the backward pass recomputes with the forward's own
        # while decoding, XLA's CPU backend copies a layer faster by an index that it cannot see than by a constant
        index = start if cache is None else jax.lax.optimization_barrier(jnp.int32(start))

        def alone(carry: tuple, layers: Tree, changed: LayerDeltas | None) -> tuple:
            return step(carry, start, take_all(layers, index, x.dtype), changed)

        if remat or platform() != "cpu" or on_several() or is_quantized(layers["attn"]["w_q"]):
            # or the backward pass would keep the layer as it was taken: a copy, gathered or dequantised
            alone = jax.checkpoint(alone, policy=policy)
        carry = alone(carry, layers, changes(start))
    else:

        def body(carry: tuple, at: tuple[jax.Array, Tree]) -> tuple[tuple, None]:
            layer, leaves = at
            return step(carry, layer, take_all(layers, layer, x.dtype), changes(layer, leaves)), None

        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        # trained leaves are scanned over, not indexed: the gradient of an index is a whole stack of zeros a layer
        leaves = None if deltas is None else deltas.leaves
        carry, _ = jax.lax.scan(body, carry, (jnp.arange(start, stop, dtype=jnp.int32), leaves))
    x, k_all, v_all = carry
    return x, cache if cache is None else cache.replace(k=k_all, v=v_all)


def take_all(layers: Tree, layer: jax.Array | int, dtype: jax.typing.DTypeLike) -> Tree:
    """One layer's leaves out of the stack in `dtype`, gathered for use where they lie on several devices."""
    # what is quantised is gathered as it lies, in few bits, and decoded behind that
    taken = map_with_path(lambda path, leaf: gathered(path, take_layer(leaf, layer)), layers)
    return jax.tree.map(lambda leaf: decoded(leaf, dtype), taken, is_leaf=is_quantized)


def _stepper(
    spec: DecoderSpec,
    dtype: jnp.dtype,
    context: Context,
    cache: Cache | None,
    fill: bool,
    windows: frozenset[int | None],
    attention_name: str,
) -> Callable[..., tuple]:
    """step((x, k, v), layer index, layer parameters) -> (x, k, v); windows are those of all its layers."""
    shared = next(iter(windows)) if len(windows) == 1 else _MIXED
    tokens = Tokens(context.positions, context.segments, context.version, context.sees)
    among_themselves = cache is None or fill
    keys = tokens if among_themselves else Tokens(cache.positions, cache.segments)
    this = kernels.Pass(
        context.segments.shape[1], spec.head_dim, dtype, windows, gaps=context.gaps, versions=context.version is not None
    )
    kernel = kernels.choose(attention_name, platform(), this)
    unlimited = 2**31 - 1
    limits = jnp.asarray([unlimited if window is None else window for window in spec.windows], jnp.int32)

    def step(carry: tuple, layer: jax.Array | int, params: Tree, deltas: LayerDeltas | None) -> tuple:
        x, k_all, v_all = carry
        # a static window, where there is one, lets one mask serve all layers
        window = spec.windows[layer] if isinstance(layer, int) else limits[layer] if shared == _MIXED else shared

        def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
            new = (None, None)
            if cache is not None:
                new = _write(k_all, k, layer, cache), _write(v_all, v, layer, cache)
            if not among_themselves:
                k, v = (take_layer(buffer, layer, v.dtype) for buffer in new)
            elif kernel != "xla":
                return kernels.attend(kernel, this, q, k, v, tokens, window), new
            return attend_tokens(q, k, v, tokens, keys, window, ordered=among_themselves), new

        x, new = DecoderLayer(spec).apply({"params": params}, x, context, layer, attention, deltas)
        return (by_rows(settle(x)), *new)

    return step


def _products(primitive: Any, *_: Any, **__: Any) -> bool:
    """What the backward pass keeps: matrix products and the weights of attention, or what an attention kernel gives. The
    rest is cheap to compute again, and the layers taken from the stack are taken again: kept, they would be a second stack.
    """
    return primitive.name in ("dot_general", "exp", *kernels.KEPT)


def _write(buffer: jax.Array, values: jax.Array, layer: jax.Array, cache: Cache) -> jax.Array:
    """Puts [B, T, K, H] into the buffer [L, B, C, K, H] at one layer and the step's slots; in place, as the scan owns it."""
    if cache.aside is not None:
        buffer = put(buffer, values[None, :, :-1], (layer, 0, cache.aside, 0, 0))
        values = values[:, -1:]
    return put(buffer, values[None], (layer, 0, cache.start, 0, 0))


def final_norm(spec: DecoderSpec, backbone: Tree, x: jax.Array) -> jax.Array:
    """The norm before the head."""
    return norm(spec, x, backbone["final_norm"]["scale"], backbone["final_norm"].get("bias"))


def stream_dtype(backbone: Tree) -> jnp.dtype:
    """The type of the residual stream: that of norms, which are never quantised."""
    return backbone["final_norm"]["scale"].dtype


def head_matrix(backbone: Tree) -> Tree:
    """The head's own table [V, D], or the embedding where tied; it may be quantised."""
    return backbone["head"]["w"] if "head" in backbone else backbone["embed"]["tokens"]


def head_rows(backbone: Tree, tokens: jax.Array) -> jax.Array:
    """The head's rows of tokens, [B, T] int32 -> [B, T, D]."""
    return table_rows(head_matrix(backbone), tokens, stream_dtype(backbone))


def logits(spec: DecoderSpec, backbone: Tree, x: jax.Array) -> jax.Array:
    """Float32 logits over all rows of the embedding, [..., D] -> [..., V]; x after the final norm."""
    return by_vocabulary(table_logits(x, head_matrix(backbone)))
