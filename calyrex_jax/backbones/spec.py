"""DecoderSpec: everything about a backbone but its weights, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from calyrex_jax.backbones.fields import Fields
from calyrex_jax.backbones.rope import RopeSpec, rope_from_config
from calyrex_jax.core.errors import UserError

__all__ = ["ACTIVATIONS", "FAMILIES", "DecoderSpec", "RopeSpec", "check_length", "check_tokens"]

ACTIVATIONS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")

# Fields that change the computation of some relative of these families and are not implemented:
# only the values that leave it unchanged pass.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({},),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "logit_scale": (1.0,),
    "logits_scaling": (1.0,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "attention_chunk_size": (),
    "clip_qkv": (),
    "qk_norm": (False,),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "parallel_residual": (False,),
    "use_parallel_residual": (False,),
    "no_rope_layers": ([],),
    "no_rope_layer_interval": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "alibi": (False,),
}


@dataclass(frozen=True)
class DecoderSpec:
    """A decoder-only backbone. Hashable, so that it may be a static argument of jit and an attribute of linen modules.

    windows has one entry a layer: how many latest positions a query sees, itself included, or None for all.
    scale multiplies the attention scores; with inverse_layer_scale layer i's are divided by i + 1 as well.
    """

    family: str
    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm: str  # "rms" or "layer"
    norm_eps: float
    activation: str
    gated: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    rope: RopeSpec | None
    learned_positions: bool
    windows: tuple[int | None, ...]
    scale: float
    inverse_layer_scale: bool = False

    @staticmethod
    def from_config(config: dict, where: str = "config.json") -> DecoderSpec:
        """The spec that a config.json describes.

            >>> from calyrex_jax.backbones.named import NAMED
            >>> DecoderSpec.from_config(NAMED["SmolLM2-135M"]).num_layers
            30

        Raises UserError on an unknown architecture, a missing or mistyped field, or one that asks for a computation
        which is not implemented; never ignores such a field.
        """
        fields = Fields(config, where)
        if not isinstance(config.get("model_type"), str) or config["model_type"] not in FAMILIES:
            raise UserError(
                f"{where}: model_type {config.get('model_type')!r} is not supported; known: {', '.join(sorted(FAMILIES))}"
            )
        for name, harmless in _HARMLESS.items():
            fields.refuse_unless(name, harmless, "the backbone does not compute it")
        return FAMILIES[config["model_type"]](fields)


def _llama(fields: Fields) -> DecoderSpec:
    biased = fields.flag("attention_bias", False)
    fields.refuse_unless("sliding_window", (), "llama has no sliding window")
    layers = fields.integer("num_hidden_layers")
    _check_layer_types(fields, ["full_attention"] * layers)
    return _rotary("llama", fields, biased, biased, fields.flag("mlp_bias", False), (None,) * layers)


def _mistral(fields: Fields) -> DecoderSpec:
    for name in ("attention_bias", "mlp_bias"):
        fields.refuse_unless(name, (False,), "mistral has no biases")
    layers = fields.integer("num_hidden_layers")
    # an explicit null means no window; an absent field means 4096, as in transformers
    window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    _check_layer_types(fields, ["full_attention" if window is None else "sliding_attention"] * layers)
    return _rotary("mistral", fields, False, False, False, (window,) * layers)


def _qwen2(fields: Fields) -> DecoderSpec:
    fields.refuse_unless("attention_bias", (True,), "qwen2 always has q, k and v biases")
    fields.refuse_unless("mlp_bias", (False,), "qwen2 has no mlp biases")
    fields.refuse_unless("use_mrope", (False,), "multimodal rotary positions are not implemented")
    return _rotary("qwen2", fields, True, False, False, _qwen2_windows(fields))


def _qwen2_windows(fields: Fields) -> tuple[int | None, ...]:
    layers = fields.integer("num_hidden_layers")
    window = None
    if fields.flag("use_sliding_window", False):
        window = fields.integer("sliding_window", None if "sliding_window" in fields.values else 4096)
    if not fields.has("layer_types"):
        first = fields.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UserError(f"{fields.where}: max_window_layers is {first!r}; expected a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = fields.values["layer_types"]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise UserError(
            f"{fields.where}: layer_types must list {' or '.join(known)} for each of {layers} layers, got {kinds!r}"
        )
    if window is None and "sliding_attention" in kinds:
        raise UserError(
            f"{fields.where}: layer_types asks for sliding_attention, but use_sliding_window is false or sliding_window "
            "null; set both or neither"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_layer_types(fields: Fields, expected: list[str]) -> None:
    fields.refuse_unless("layer_types", (expected,), f"this family attends the same way in all {len(expected)} layers")


def _rotary(
    family: str, fields: Fields, qkv_bias: bool, out_bias: bool, mlp_bias: bool, windows: tuple[int | None, ...]
) -> DecoderSpec:
    """What llama, qwen2 and mistral share."""
    embed_dim, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    # null means as many as query heads; absent is mistral's 8, as in transformers
    absent = 8 if family == "mistral" and "num_key_value_heads" not in fields.values else heads
    kv_heads = fields.integer("num_key_value_heads", absent)
    head_dim = fields.integer("head_dim", None) or _head_dim(fields, embed_dim, heads, "hidden_size", "num_attention_heads")
    if heads % kv_heads:
        raise UserError(f"{fields.where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    rope = rope_from_config(fields.values, fields.where)
    if head_dim % 2 or (rope.kind == "dynamic" and head_dim < 4):
        raise UserError(f"{fields.where}: head_dim {head_dim} cannot be rotated; expected an even number")
    return DecoderSpec(
        family=family,
        vocab_size=fields.integer("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.integer("intermediate_size"),
        num_layers=len(windows),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=fields.integer("max_position_embeddings"),
        norm="rms",
        norm_eps=fields.number("rms_norm_eps"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        gated=True,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        tied=fields.flag("tie_word_embeddings", False),
        rope=rope,
        learned_positions=False,
        windows=windows,
        scale=head_dim**-0.5,
    )


def _gpt2(fields: Fields) -> DecoderSpec:
    embed_dim, heads = _either(fields, "n_embd", "hidden_size"), _either(fields, "n_head", "num_attention_heads")
    head_dim = _head_dim(fields, embed_dim, heads, "n_embd", "n_head")
    layers = _either(fields, "n_layer", "num_hidden_layers")
    for name in ("rope_scaling", "rope_parameters", "rope_theta", "sliding_window", "head_dim"):
        fields.refuse_unless(name, (), "gpt2 has learned positions and no windows")
    if _either(fields, "num_key_value_heads", "num_key_value_heads", heads) != heads:
        raise UserError(f"{fields.where}: num_key_value_heads differs from n_head; gpt2 has no grouped queries")
    return DecoderSpec(
        family="gpt2",
        vocab_size=fields.integer("vocab_size"),
        embed_dim=embed_dim,
        mlp_dim=fields.integer("n_inner", 4 * embed_dim),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_positions=_either(fields, "n_positions", "max_position_embeddings"),
        norm="layer",
        norm_eps=fields.number("layer_norm_epsilon"),
        activation=fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tied=fields.flag("tie_word_embeddings", True),
        rope=None,
        learned_positions=True,
        windows=(None,) * layers,
        scale=head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0,
        inverse_layer_scale=fields.flag("scale_attn_by_inverse_layer_idx", False),
    )


def _either(fields: Fields, name: str, alias: str, default: Any = None) -> int:
    if default is not None:
        return fields.integer(name, default)
    return fields.integer(alias) if not fields.has(name) and fields.has(alias) else fields.integer(name)


def _head_dim(fields: Fields, embed_dim: int, heads: int, width: str, count: str) -> int:
    if embed_dim % heads:
        raise UserError(
            f"{fields.where}: {width} {embed_dim} is not a multiple of {count} {heads}; set head_dim or mend them"
        )
    return embed_dim // heads


FAMILIES: dict[str, Callable[[Fields], DecoderSpec]] = {"llama": _llama, "qwen2": _qwen2, "mistral": _mistral, "gpt2": _gpt2}


def check_length(spec: DecoderSpec, length: int, what: str) -> None:
    """UserError where learned positions end before `length`; call on the host, as jit would silently reuse the last one.

    Rotary models have no such end: how far beyond max_positions they are used is the caller's choice.
    """
    if spec.learned_positions and length > spec.max_positions:
        raise UserError(f"{what}: {length} tokens, but the backbone has only {spec.max_positions} positions; shorten it")


def check_tokens(spec: DecoderSpec, largest: int, what: str) -> None:
    """UserError where a token id lies beyond the embedding's rows; jit would silently take the last row."""
    if not 0 <= largest < spec.vocab_size:
        raise UserError(
            f"{what}: token id {largest}, but the backbone has only {spec.vocab_size}; use the model's own tokenizer"
        )
