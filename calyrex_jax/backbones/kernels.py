"""Which program computes attention: XLA's products, splash (Pallas) on TPUs, or cuDNN's flash attention on NVIDIA GPUs.

    this = Pass(length=2048, head_dim=128, dtype=x.dtype)
    if (kernel := choose("auto", platform(), this)) != "xla":
        out = attend(kernel, this, q, k, v, tokens, window=None)

Kernels serve passes in which the tokens at hand attend to each other: training, scores, prefill. They never hold T * T scores
a head. Single tokens, SVGT's versions of bridges, and what a kernel cannot do go through `attention.attend_tokens`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from calyrex_jax.backbones.attention import Tokens, visible
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import platform
from calyrex_jax.core.placing import per_device

NAMES = ("auto", "xla", "cudnn", "splash")
_HOME = {"tpu": "splash", "gpu": "cudnn"}
# primitives whose results the backward pass of a kernel needs: splash names its own, cuDNN's is one
KEPT = ("name", "dot_product_attention_fwd_wrapper")
_SHORTEST = 512  # tokens from which auto takes a kernel: below, the scores are few
_LONGEST_MASK = 8192  # cuDNN reads the mask from memory, T * T of it a row


@dataclass(frozen=True)
class Pass:
    """What decides which kernel can serve one attention.

    length    tokens that attend to each other
    windows   of all layers that share the program; None is no window
    gaps      whether positions may leave numbers out within a segment, so that slots do not tell a window
    versions  whether some keys are hidden from some queries beyond segments and order (`Tokens.version`)
    """

    length: int
    head_dim: int
    dtype: jnp.dtype
    windows: frozenset[int | None] = frozenset((None,))
    gaps: bool = False
    versions: bool = False

    @property
    def bands(self) -> frozenset[int | None]:
        """The windows in slots, None for those that hide nothing; empty where slots do not tell what a window hides."""
        if self.gaps:
            return self.windows & {None} if len(self.windows) == 1 else frozenset()
        return frozenset(None if window is None or window >= self.length else window for window in self.windows)


def choose(name: str, where: str, this: Pass) -> str:
    """xla, splash or cudnn: what computes this pass on platform `where`, config.attention being `name`."""
    kernel = _HOME.get(where, "xla") if name == "auto" else name
    if kernel == "xla" or this.versions or refusal(kernel, this.head_dim, this.dtype):
        return "xla"
    if this.length < (_SHORTEST if name == "auto" else 2):
        return "xla"
    if kernel == "splash":
        return "splash" if len(this.bands) == 1 else "xla"
    return "cudnn" if this.length <= _LONGEST_MASK and (name != "auto" or _has_flash()) else "xla"


def refusal(kernel: str, head_dim: int, dtype: jnp.dtype) -> str:
    """Why a kernel serves no layer of such a backbone, and what helps; "" where it does."""
    if kernel == "cudnn" and dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"takes 16-bit floats, not config.backbone.dtype={jnp.dtype(dtype)}; set that to bfloat16, or attention to auto"
        )
    if kernel == "cudnn" and (head_dim % 8 or head_dim > 128):
        return f"takes heads of a multiple of 8 up to 128, not {head_dim}; set attention to auto"
    if kernel == "splash" and head_dim % 8:
        return f"takes heads of a multiple of 8, not {head_dim}; set attention to auto"
    return ""


def check_attention(name: str, where: str, head_dim: int, dtype: jnp.dtype) -> None:
    """UserError where config.attention names a kernel that can serve no pass of this backbone on platform `where`."""
    home = {kernel: place for place, kernel in _HOME.items()}
    if name in home and home[name] != where:
        kind = {"tpu": "TPUs", "gpu": "NVIDIA GPUs"}[home[name]]
        raise UserError(
            f"config.attention={name} runs on {kind}, and this is for {where}; set config.attention to auto, which takes the "
            "fastest that there is, or to xla"
        )
    if why := refusal(name, head_dim, dtype):
        raise UserError(f"config.attention={name} {why}")


def _has_flash() -> bool:
    """Whether the GPU here has cuDNN's flash attention: NVIDIA's from Ampere on. True where there is none to ask."""
    found = getattr(jax.local_devices()[0], "compute_capability", "8.0")
    return bool(re.fullmatch(r"\d+\.\d+", found)) and float(found) >= 8


def attend(
    kernel: str, this: Pass, q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, window: jax.Array | int | None
) -> jax.Array:
    """`attention.attend_tokens` among these tokens, by the kernel that `choose` named for this pass: [B, T, N, H]."""

    def own(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        if kernel == "cudnn":
            return cudnn(q, k, v, Tokens(positions, segments), window)
        from calyrex_jax.backbones.splash import splash  # Pallas takes a second to import

        [band] = this.bands
        return splash(q, k, v, segments, band, interpret=platform() == "cpu")

    return per_device(own, q, k, v, tokens.positions, tokens.segments)


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array, tokens: Tokens, window: jax.Array | int | None) -> jax.Array:
    """cuDNN's flash attention with the mask of `visible`: q [B, T, N, H] already scaled, k and v [B, T, K, H]."""
    length = q.shape[1]
    if length % 2:  # its backward pass takes even lengths alone
        q, k, v = (jnp.pad(array, ((0, 0), (0, 1), (0, 0), (0, 0))) for array in (q, k, v))
        tokens = jax.tree.map(lambda array: jnp.pad(array, ((0, 0), (0, 1))), tokens)
    # padding sees itself, for a row without any key would give the mean of all; its result is put to zero below
    mask = visible(tokens, tokens, window) | jnp.eye(q.shape[1], dtype=bool)
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=1.0, is_causal=True, implementation="cudnn")
    return jnp.where(tokens.segments[:, :, None, None] != 0, out, 0)[:, :length]
