"""Splash attention, JAX's Pallas kernel for TPUs, over packed and padded rows; imported only where it is used.

    out = splash(q, k, v, segments, window=None, interpret=False)

It computes block by block what `attention.attend_tokens` computes from all scores of a piece, forward and backward, and
leaves out the blocks that causality or the window hides. On CPUs `interpret=True` runs the same kernel, slowly, for tests.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

SAVED = "attention"  # the name under which a rematerialisation policy finds what the kernel's backward pass needs
_BLOCKS = (512, 256, 128)  # queries, and keys, at once: large ones reuse more of what is loaded; 128 is the lanes of a TPU


def splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int | None, interpret: bool) -> jax.Array:
    """q [B, T, N, H] already scaled, k and v [B, T, K, H], segments [B, T] int32 (0: padding) -> [B, T, N, H].

    A query sees the keys of its segment up to its own slot, the `window` latest ones where that is given. Scores and softmax
    are float32. Padding gets exact zeros, and zeros for gradients.
    """
    length = q.shape[1]
    block = block_size(length)
    room = -length % block

    def ready(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, room), (0, 0), (0, 0))).swapaxes(1, 2)

    within = jnp.pad(segments, ((0, 0), (0, room)))
    run = _kernel(length + room, block, window, interpret)
    out = jax.vmap(lambda *row: run(*row[:3], kernel.SegmentIds(row[3], row[3])))(ready(q), ready(k), ready(v), within)
    # padding saw itself: no row of the kernel may be without any key
    return jnp.where(segments[:, :, None, None] != 0, out.swapaxes(1, 2)[:, :length], 0)


def block_size(length: int) -> int:
    """The largest block to which `length` can be filled up by at most an eighth; 128 where none is."""
    return next((size for size in _BLOCKS if -length % size <= length // 8), _BLOCKS[-1])


@functools.lru_cache(maxsize=64)
def _kernel(length: int, block: int, window: int | None, interpret: bool) -> kernel.SplashAttentionKernel:
    """The kernel of one shape, its masks as numpy arrays, so that it may be used in any trace."""
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = kernel.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    with jax.ensure_compile_time_eval():
        made = kernel.make_splash_mha(
            masks.MultiHeadMask([_Band(length, window)]),  # one mask for all heads
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            residual_checkpoint_name=SAVED,
            interpret=interpret,
        )
        return jax.tree.map(np.asarray, made)


class _Band(masks.LocalMask):
    """Keys up to the query's slot, the `window` latest ones.

    A block is asked whether any and all of it is seen, which for blocks off the edges is known without computing them: the
    masks of 32k tokens take a second then, not half a minute.
    """

    def __init__(self, length: int, window: int | None):
        super().__init__((length, length), (None if window is None else window - 1, 0), 0)
        self.window = length if window is None else window

    def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
        rows, columns = (part.indices(size) for part, size in zip(index, self.shape))
        nearest, farthest = rows[0] - (columns[1] - 1), rows[1] - 1 - columns[0]
        if farthest < 0 or nearest >= self.window or (nearest >= 0 and farthest < self.window):
            return np.full((1, 1), nearest >= 0 and farthest < self.window)
        return super().__getitem__(index)
