"""ITI's shifts from labelled replies: probes on every head's output, and the direction of the best ones.

    heads = head_outputs(spec, backbone, batch, index)      # [L, B, N, H]
    shift, chosen = fit(spec, backbone, heads, labels, validation_heads, validation_labels, count=48)

Source: Li et al., arXiv 2306.03341, §3: top heads by validation accuracy, mass-mean direction.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.attention import Tokens, attend_tokens
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import take_layer
from calyrex_jax.core.types import Array, Batch, Tree

_RIDGE = 1e-2  # of a probe, relative to its inputs' mean square


@dataclass(frozen=True)
class Head:
    """A head that is shifted, and how well its probe tells the labels apart on validation."""

    layer: int
    head: int
    accuracy: float


def head_outputs(spec: DecoderSpec, backbone: Tree, batch: Batch, index: Array) -> jax.Array:
    """What attention's heads give at one slot of each row, index [B]: [L, B, N, H] float32, before the output projection."""
    context = decoder.make_context(spec, batch.positions, batch.segments)
    tokens = Tokens(batch.positions, batch.segments)
    unlimited = 2**31 - 1
    windows = jnp.asarray([unlimited if window is None else window for window in spec.windows], jnp.int32)

    def body(x: Array, layer: Array) -> tuple[Array, Array]:
        leaves = jax.tree.map(lambda leaf: take_layer(leaf, layer), backbone["layers"])

        def attention(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
            out = attend_tokens(q, k, v, tokens, tokens, windows[layer], ordered=True)
            return out, jnp.take_along_axis(out, index[:, None, None, None], axis=1)[:, 0]

        x, seen = decoder.DecoderLayer(spec).apply({"params": leaves}, x, context, layer, attention)
        return x, seen.astype(jnp.float32)

    x = decoder.embed(spec, backbone, batch.tokens, batch.positions)
    return jax.lax.scan(body, x, jnp.arange(spec.num_layers, dtype=jnp.int32))[1]


def fit(
    spec: DecoderSpec,
    backbone: Tree,
    heads: np.ndarray,
    labels: np.ndarray,
    validation: np.ndarray,
    validation_labels: np.ndarray,
    count: int,
) -> tuple[np.ndarray, list[Head]]:
    """The shifts [L, D] at strength 1, towards safe, and the `count` heads behind them, the best first.

    heads, validation  [L, B, N, H] of training's and validation's replies; labels [B], 1 harmful
    Raises UserError where there are not so many heads.
    """
    layers, _, number, _ = heads.shape
    if not 1 <= count <= layers * number:
        raise UserError(f"config.iti.heads is {count}; this backbone has {layers * number} heads; choose 1 to that many")
    found = [
        Head(l, n, probe_accuracy(heads[l, :, n], labels, validation[l, :, n], validation_labels))
        for l in range(layers)
        for n in range(number)
    ]
    chosen = sorted(found, key=lambda head: (-head.accuracy, head.layer, head.head))[:count]
    shift = np.zeros((layers, spec.embed_dim), np.float32)
    for head in chosen:
        outputs = heads[head.layer, :, head.head]
        direction = outputs[labels < 0.5].mean(0) - outputs[labels > 0.5].mean(0)
        direction /= max(float(np.linalg.norm(direction)), 1e-12)
        w_o = np.asarray(take_layer(backbone["layers"]["attn"]["w_o"], head.layer)[head.head].astype(jnp.float32))
        shift[head.layer] += (outputs @ direction).std() * (direction @ w_o)
    return shift, chosen


def probe_accuracy(x: np.ndarray, labels: np.ndarray, other: np.ndarray, other_labels: np.ndarray) -> float:
    """A ridge probe's accuracy on `other` [M, H] after x [B, H], classes weighted alike."""
    centre = (x[labels > 0.5].mean(0) + x[labels < 0.5].mean(0)) / 2
    inputs, wanted = x - centre, np.where(labels > 0.5, 1.0, -1.0)
    gram = inputs.T @ inputs / len(inputs)
    ridge = _RIDGE * max(np.trace(gram) / len(gram), 1e-12)
    weights = np.linalg.solve(gram + ridge * np.eye(len(gram)), inputs.T @ wanted / len(inputs))
    right = ((other - centre) @ weights > 0) == (other_labels > 0.5)
    return float((right[other_labels > 0.5].mean() + right[other_labels < 0.5].mean()) / 2)
