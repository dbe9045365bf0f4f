"""A Hugging Face config.json's content, made from the fields of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights.gguf import GGUFReader, Header

ROPE_FACTORS = "rope_freqs.weight"

# Fields without influence on the arithmetic, or read from elsewhere (the vocabulary's size: the embedding's rows).
_NO_EFFECT = {"vocab_size", "rope.scaling.finetuned", "tensor_data_layout"}
_ARCHITECTURES = ("llama", "qwen2", "gpt2")
# Meta's constants of every Llama 3.1, 3.2 and 3.3 checkpoint; llama.cpp stores only what follows from them.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _Fields:
    """The fields of one architecture, each taken at most once, so that what is left over was not understood."""

    def __init__(self, fields: dict[str, Any], architecture: str, where: str):
        self.where, self.prefix = where, f"{architecture}."
        self.left = {name[len(self.prefix) :]: v for name, v in fields.items() if name.startswith(self.prefix)}

    def take(self, name: str, kind: type, default: Any = None) -> Any:
        value = self.left.pop(name, default)
        if value is None:
            raise UserError(
                f"{self.where}: the field {self.prefix}{name} is missing; take a file made by llama.cpp's converter"
            )
        if isinstance(value, np.ndarray):  # one value a layer
            if len(set(value.tolist())) != 1:
                raise UserError(f"{self.where}: {self.prefix}{name} differs from layer to layer, which is not supported")
            value = value[0].item()
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            # stored as float32: the shortest decimal that gives the same float32 is what the author wrote
            return float(str(np.float32(value)))
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(
                f"{self.where}: {self.prefix}{name} is {value!r}; expected {kind.__name__}; fetch the file again"
            )
        return value


def config_from_gguf(header: Header, reader: GGUFReader, where: str) -> dict[str, Any]:
    """What config.json would say of this file.

        config_from_gguf(read_header(path), GGUFReader(path), str(path))["model_type"]     # "llama"

    Raises UserError on an unknown architecture or on any field that would change the arithmetic in an unknown way.
    """
    architecture = header.fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise UserError(f"{where}: architecture {architecture!r} is not supported; known: {', '.join(_ARCHITECTURES)}")
    if header.fields.get("split.count", 0) not in (0, 1):
        raise UserError(
            f"{where}: one part of a split file; join them first: llama-gguf-split --merge FIRST_PART WHOLE.gguf"
        )
    fields = _Fields(header.fields, architecture, where)
    tensors = header.tensors
    if "token_embd.weight" not in tensors:
        raise UserError(f"{where}: token_embd.weight is missing; this is no language model; give a whole model's file")
    config = {
        "model_type": architecture,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        **_special_tokens(header.fields),
    }
    config |= _gpt2(fields) if architecture == "gpt2" else _rotary(fields, header, reader)
    unknown = sorted(set(fields.left) - _NO_EFFECT)
    if unknown:
        names = ", ".join(fields.prefix + name for name in unknown)
        raise UserError(f"{where}: the fields {names} are not understood and may change what the model computes")
    return config


def _special_tokens(fields: dict[str, Any]) -> dict[str, Any]:
    ids = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding", "eot", "eom")}
    # a chat model ends its turn with eot where that differs from eos
    stops = list(dict.fromkeys(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None))
    found = {
        "bos_token_id": ids["bos"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "pad_token_id": ids["padding"],
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def _gpt2(fields: _Fields) -> dict[str, Any]:
    return {
        "n_layer": fields.take("block_count", int),
        "n_positions": fields.take("context_length", int),
        "n_embd": fields.take("embedding_length", int),
        "n_inner": fields.take("feed_forward_length", int),
        "n_head": fields.take("attention.head_count", int),
        "layer_norm_epsilon": fields.take("attention.layer_norm_epsilon", float),
        "activation_function": "gelu_new",
    }


def _rotary(fields: _Fields, header: Header, reader: GGUFReader) -> dict[str, Any]:
    heads, width = fields.take("attention.head_count", int), fields.take("embedding_length", int)
    rotated = fields.take("rope.dimension_count", int, width // max(heads, 1))
    head_dim = fields.take("attention.key_length", int, rotated)
    if {fields.take("attention.value_length", int, head_dim), rotated} != {head_dim}:
        raise UserError(f"{fields.where}: heads whose keys, values and rotated part differ in width are not supported")
    if fields.take("expert_count", int, 0) or fields.take("expert_used_count", int, 0):
        raise UserError(f"{fields.where}: a mixture of experts is not supported; known: dense llama, qwen2 and gpt2")
    config = {
        "num_hidden_layers": fields.take("block_count", int),
        "max_position_embeddings": fields.take("context_length", int),
        "hidden_size": width,
        "intermediate_size": fields.take("feed_forward_length", int),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.take("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.take("attention.layer_norm_rms_epsilon", float),
        "rope_theta": fields.take("rope.freq_base", float, 10000.0),  # the format's default
        "hidden_act": "silu",
    }
    scaling = _scaling(fields, header, reader, config)
    if scaling:
        config["rope_scaling"] = scaling
    window = fields.take("attention.sliding_window", int, 0)
    if header.fields["general.architecture"] == "qwen2":
        if window:
            raise UserError(
                f"{fields.where}: qwen2.attention.sliding_window does not say which layers it is for; not supported"
            )
        return config
    names = header.tensors
    biases = {
        "attention_bias": any(f"blk.0.attn_{part}.bias" in names for part in ("q", "k", "v", "output")),
        "mlp_bias": any(f"blk.0.ffn_{part}.bias" in names for part in ("gate", "up", "down")),
    }
    # llama.cpp calls mistral "llama"; the two differ in the window alone
    return config | ({"model_type": "mistral", "sliding_window": window} if window else biases)


def _scaling(fields: _Fields, header: Header, reader: GGUFReader, config: dict[str, Any]) -> dict[str, Any] | None:
    kind = fields.take("rope.scaling.type", str, "none")
    factor = fields.take("rope.scaling.factor", float, fields.take("rope.scale_linear", float, 1.0))
    original = fields.take("rope.scaling.original_context_length", int, 0)
    if kind == "none" and factor not in (0.0, 1.0):  # files older than the type field scale linearly
        kind = "linear"
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"{fields.where}: rotary scaling {kind!r} is not supported in GGUF files; known: none, linear, yarn")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise UserError(f"{fields.where}: has both {ROPE_FACTORS} and {kind} scaling; only one of them is supported")
        size = header.tensors[ROPE_FACTORS].shape[0]
        return _llama3(reader.rows(ROPE_FACTORS, 0, size), config, fields.where)
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        if not original:
            raise UserError(
                f"{fields.where}: yarn scaling without rope.scaling.original_context_length; fetch the file again"
            )
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3(stored: np.ndarray, config: dict[str, Any], where: str) -> dict[str, Any] | None:
    """The llama3 scaling that the stored divisors of the rotary frequencies express, [H/2]; None where all are 1."""
    stored = stored.astype(np.float64)
    if stored.shape == (config["head_dim"] // 2,) and np.all(stored == 1.0):
        return None
    # the lowest frequency is always scaled in full
    scaling = {"rope_type": "llama3", "factor": float(str(np.float32(stored.max()))), **_LLAMA3}
    low, high, original = (
        _LLAMA3[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    frequencies = config["rope_theta"] ** -(np.arange(0, config["head_dim"], 2) / config["head_dim"])
    smooth = np.clip((original * frequencies / (2 * math.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / scaling["factor"] + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4, atol=0):
        raise UserError(
            f"{where}: {ROPE_FACTORS} is not Llama 3's scaling (low 1, high 4, 8192 positions), the only one that can be "
            "read from a GGUF file; load the checkpoint from safetensors"
        )
    return scaling
