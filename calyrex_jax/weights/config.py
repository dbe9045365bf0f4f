"""config.json from a spec, for exported checkpoints."""

from __future__ import annotations

from typing import Any

from calyrex_jax.backbones.spec import DecoderSpec, RopeSpec


def config_from_spec(spec: DecoderSpec) -> dict[str, Any]:
    """The Hugging Face config.json content that reads back as `spec`.

    DecoderSpec.from_config(config_from_spec(spec)) == spec
    """
    if spec.family == "gpt2":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": spec.vocab_size,
            "n_embd": spec.embed_dim,
            "n_inner": spec.mlp_dim,
            "n_layer": spec.num_layers,
            "n_head": spec.num_heads,
            "n_positions": spec.max_positions,
            "layer_norm_epsilon": spec.norm_eps,
            "activation_function": spec.activation,
            "tie_word_embeddings": spec.tied,
            "scale_attn_weights": spec.scale != 1.0,
            "scale_attn_by_inverse_layer_idx": spec.inverse_layer_scale,
        }
    assert spec.rope is not None, "all families but gpt2 are rotary"
    architecture = {"llama": "Llama", "qwen2": "Qwen2", "mistral": "Mistral"}[spec.family]
    config = {
        "model_type": spec.family,
        "architectures": [f"{architecture}ForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.embed_dim,
        "intermediate_size": spec.mlp_dim,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": spec.activation,
        "tie_word_embeddings": spec.tied,
        "rope_theta": spec.rope.theta,
        "rope_scaling": _scaling(spec.rope),
    }
    if spec.family == "llama":
        return config | {"attention_bias": spec.out_bias, "mlp_bias": spec.mlp_bias}
    if spec.family == "mistral":
        return config | {"sliding_window": spec.windows[0]}
    window = next((window for window in spec.windows if window is not None), None)
    kinds = ["full_attention" if w is None else "sliding_attention" for w in spec.windows]
    return config | {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}


def _scaling(rope: RopeSpec) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        scaling |= {
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "truncate": rope.truncate,
        }
    return scaling
