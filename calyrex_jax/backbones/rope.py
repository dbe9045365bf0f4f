"""Rotary position embedding: its scalings, read from a config and turned into float32 phases."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from calyrex_jax.backbones.fields import Fields
from calyrex_jax.core.errors import UserError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
DEFAULT_THETA = 10000.0  # of transformers' llama, qwen2 and mistral, for configs older than the field

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_OPTIONAL = {"yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "finetuned")}
_COMMON = ("type", "rope_type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True)
class RopeSpec:
    """Base, scaling and its constants.

    original_positions is the length before scaling (llama3, yarn) or the length above which the base grows (dynamic).
    attention_factor multiplies cosine and sine (yarn).
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


def rope_from_config(config: dict, where: str) -> RopeSpec:
    """The rotary embedding that a config.json asks for, in the older (`rope_theta`, `rope_scaling`) or the newer
    (`rope_parameters`) form.

        >>> rope_from_config({"rope_theta": 5e5, "max_position_embeddings": 64}, "config.json").theta
        500000.0

    Raises UserError on an unknown scaling, a missing or unknown key, or two forms that contradict each other.
    """
    fields = Fields(config, where)
    if fields.has("rope_scaling") and fields.has("rope_parameters") and config["rope_scaling"] != config["rope_parameters"]:
        raise UserError(
            f"{where}: rope_scaling and rope_parameters contradict each other; keep the one that was trained with"
        )
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    inner = Fields(config.get(name) or {}, f"{where}: {name}")
    fields.refuse_unless("partial_rotary_factor", (1.0,), "rotating a part of each head is not implemented")
    inner.refuse_unless("partial_rotary_factor", (1.0,), "rotating a part of each head is not implemented")
    fields.refuse_unless("rope_interleaved", (False,), "interleaved rotary pairs are not implemented")
    kind = _kind(inner)
    theta = _theta(fields, inner, name, kind)
    max_positions = fields.integer("max_position_embeddings")
    _check_keys(inner, kind, max_positions)
    if kind == "default":
        return RopeSpec(theta)
    factor = inner.number("factor")
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    if kind == "dynamic":
        return RopeSpec(theta, kind, factor, max_positions)
    # transformers lets the top level override the nested field
    original = fields.integer("original_max_position_embeddings", None) or inner.integer("original_max_position_embeddings")
    if kind == "llama3":
        low, high = inner.number("low_freq_factor"), inner.number("high_freq_factor")
        if high <= low:
            raise UserError(f"{inner.where}: high_freq_factor {high} must exceed low_freq_factor {low}; mend the fields")
        return RopeSpec(theta, kind, factor, original, low, high)
    return RopeSpec(
        theta,
        kind,
        factor,
        original,
        attention_factor=_yarn_attention_factor(inner, factor),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=inner.flag("truncate", True),
    )


def _kind(inner: Fields) -> str:
    kinds = {inner.choice(name, KINDS, None) for name in ("rope_type", "type")} - {None}
    if len(kinds) > 1:
        raise UserError(f"{inner.where}: rope_type and type contradict each other; keep rope_type")
    nested = [key for key, value in inner.values.items() if isinstance(value, dict)]
    if nested:
        raise UserError(
            f"{inner.where}: a rotary embedding per layer type ({', '.join(nested)}) is not supported; expected one"
        )
    if not kinds and set(inner.values) - {"rope_theta", "partial_rotary_factor"}:
        raise UserError(f"{inner.where}: rope_type is missing; expected one of {', '.join(KINDS)}")
    return kinds.pop() if kinds else "default"


def _theta(fields: Fields, inner: Fields, name: str, kind: str) -> float:
    outer, nested = fields.number("rope_theta", None), inner.number("rope_theta", None)
    if outer is not None and nested is not None and outer != nested:
        raise UserError(f"{fields.where}: rope_theta is {outer:g} but {name}.rope_theta is {nested:g}; keep the trained one")
    if outer is None and nested is None:
        # configs from before the field existed have neither form; in the newer one, and with llama3, it is never implied
        if kind == "llama3" or (name == "rope_parameters" and inner.values):
            raise UserError(
                f"{fields.where}: rope_theta is missing beside {name}; expected the base of the rotary embedding"
            )
        return DEFAULT_THETA
    return nested if outer is None else outer


def _check_keys(inner: Fields, kind: str, max_positions: int) -> None:
    outer_original = ("original_max_position_embeddings",) if kind in ("llama3", "yarn") else ()
    allowed = {*_COMMON, *_KEYS[kind], *_OPTIONAL.get(kind, ()), *outer_original}
    if kind == "dynamic":
        inner.refuse_unless(
            "original_max_position_embeddings", (max_positions,), "the base grows from max_position_embeddings on"
        )
        allowed.add("original_max_position_embeddings")
    unknown = sorted(key for key in inner.values if key not in allowed and inner.has(key))
    if unknown:
        raise UserError(
            f"{inner.where}: {', '.join(unknown)} not understood for rope_type {kind!r}; "
            f"known: {', '.join(sorted(allowed - set(_COMMON))) or 'none'}"
        )


def _yarn_attention_factor(inner: Fields, factor: float) -> float:
    given = inner.number("attention_factor", None)
    if given is not None:
        return given

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    numerator, denominator = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> np.ndarray:
    """[H/2] float32: radians a position. For `dynamic` those of lengths up to the original one.

    Formulas as in transformers' modeling_rope_utils.py; in float64, so that only the last rounding is float32's.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    plain = rope.theta**-exponents
    if rope.kind == "linear":
        plain = plain / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_positions * plain / (2 * math.pi)  # full turns within the original length
        smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        plain = (1 - smooth) * plain / rope.factor + smooth * plain
    elif rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope, head_dim)
        plain = plain / rope.factor * (1 - keep) + plain * keep
    return plain.astype(np.float32)


def _yarn_ramp(rope: RopeSpec, head_dim: int) -> np.ndarray:
    def dimension(rotations: float) -> float:
        return head_dim * math.log(rope.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    return np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)


def phases(rope: RopeSpec, head_dim: int, positions: jax.Array, lengths: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, [B, T, H/2] float32 each, of integer positions [B, T].

    lengths, [B, T] int32, fixes each token's base under `dynamic` and is not looked at otherwise.
    float32 throughout: bfloat16 phases are off by a whole radian at position 8191.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    if rope.kind == "dynamic":
        longest = jnp.maximum(lengths, rope.original_positions).astype(jnp.float32)
        growth = rope.factor * longest / rope.original_positions - (rope.factor - 1)
        # theta' = theta * growth ** (H / (H - 2)), so theta' ** (-i / H) = theta ** (-i / H) * growth ** (-i / (H - 2)):
        # the large power stays on the host in float64, and the one left to float32 is close to 1
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / (head_dim - 2)
        frequencies = frequencies * jnp.exp(-exponents * jnp.log(growth)[..., None])
    angles = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the halves of each head: x [B, T, N, H], cos and sin [B, T, H/2] float32 -> float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
