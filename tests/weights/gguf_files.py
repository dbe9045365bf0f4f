"""Tiny GGUF files, written by the gguf package from Hugging Face tensors in the way of llama.cpp's converter."""

import gguf
import numpy as np

from tests.weights.checkpoints import D, F, H, K, L, N, P, config_for, random_tensors

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def gguf_name(name):
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    stem, kind = name.rsplit(".", 1)
    for prefix in ("model.layers.", "transformer.h."):
        if stem.startswith(prefix):
            layer, inner = stem.removeprefix(prefix).split(".", 1)
            return f"blk.{layer}.{_NAMES[inner]}.{kind}"
    return f"{_NAMES[stem]}.{kind}"


def permute(weights, heads):
    """llama.cpp's converter: halves of a head become neighbours."""
    return weights.reshape(heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def convert(name, value, architecture):
    """The value that the converter stores."""
    if architecture == "llama" and ".q_proj." in name:
        return permute(value, N)
    if architecture == "llama" and ".k_proj." in name:
        return permute(value, K)
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return value.T
    return value


def fields_for(architecture):
    """The fields that the converter writes, by full name."""
    fields = {"block_count": L, "context_length": P, "embedding_length": D, "feed_forward_length": F}
    fields |= {"attention.head_count": N}
    if architecture == "gpt2":
        fields |= {"attention.layer_norm_epsilon": 1e-5}
    else:
        fields |= {"attention.head_count_kv": K, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 5e5}
    if architecture == "llama":
        fields |= {"rope.dimension_count": H, "vocab_size": 1}
    return {f"{architecture}.{name}": value for name, value in fields.items()}


def write_gguf(path, architecture, tensors=None, fields=None, extra=None, qtype=None):
    """Writes a whole model; `fields` replace or (None) remove the usual ones, `extra` tensors are stored as they are."""
    tensors = random_tensors(config_for(architecture)) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (fields_for(architecture) | {"tokenizer.ggml.eos_token_id": 2} | (fields or {})).items():
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif value is not None:
            writer.add_array(name, value)
    stored = {gguf_name(name): convert(name, value, architecture) for name, value in tensors.items()}
    for name, value in (stored | (extra or {})).items():
        value = np.ascontiguousarray(value)
        if qtype is not None and value.ndim == 2:
            writer.add_tensor(name, gguf.quantize(value, qtype), raw_dtype=qtype)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
