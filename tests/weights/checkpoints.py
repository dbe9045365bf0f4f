"""Tiny random checkpoints, written out by name so that they know nothing of the mapping under test."""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

D, F, L, N, K, H, V, P = 16, 24, 3, 4, 2, 4, 40, 32
BF16 = np.dtype(ml_dtypes.bfloat16)


def config_for(family, **changes):
    """A config.json's content."""
    if family == "gpt2":
        config = {"model_type": "gpt2", "n_embd": D, "n_inner": F, "n_layer": L, "n_head": N, "n_positions": P}
        config |= {"vocab_size": V, "layer_norm_epsilon": 1e-5}
    else:
        config = {
            "model_type": family,
            "hidden_size": D,
            "intermediate_size": F,
            "num_hidden_layers": L,
            "rms_norm_eps": 1e-5,
        }
        config |= {"num_attention_heads": N, "num_key_value_heads": K, "vocab_size": V, "max_position_embeddings": P}
        config |= {"rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu"}
    return config | changes


def shapes_for(config):
    """{Hugging Face tensor name: shape}."""
    if config["model_type"] == "gpt2":
        shapes = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (P, D)}
        for layer in range(L):
            base = f"transformer.h.{layer}."
            shapes |= {f"{base}{norm}.{kind}": (D,) for norm in ("ln_1", "ln_2") for kind in ("weight", "bias")}
            shapes |= {f"{base}attn.c_attn.weight": (D, 3 * D), f"{base}attn.c_attn.bias": (3 * D,)}
            shapes |= {f"{base}attn.c_proj.weight": (D, D), f"{base}attn.c_proj.bias": (D,)}
            shapes |= {f"{base}mlp.c_fc.weight": (D, F), f"{base}mlp.c_fc.bias": (F,)}
            shapes |= {f"{base}mlp.c_proj.weight": (F, D), f"{base}mlp.c_proj.bias": (D,)}
        return shapes | {"transformer.ln_f.weight": (D,), "transformer.ln_f.bias": (D,)}
    head = config.get("head_dim") or H
    maps = {"self_attn.q_proj": (N * head, D), "self_attn.k_proj": (K * head, D), "self_attn.v_proj": (K * head, D)}
    maps |= {"self_attn.o_proj": (D, N * head), "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    biased = {
        name
        for name in maps
        if (name.startswith("self_attn") and config.get("attention_bias"))
        or (name.startswith("mlp") and config.get("mlp_bias"))
        or (config["model_type"] == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"))
    }
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for layer in range(L):
        base = f"model.layers.{layer}."
        shapes |= {f"{base}{norm}.weight": (D,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{base}{name}.weight": shape for name, shape in maps.items()}
        shapes |= {f"{base}{name}.bias": (maps[name][0],) for name in sorted(biased)}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (V, D)}


def random_tensors(config, dtype=np.float32, seed=0):
    """{name: random values}."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes_for(config).items()}


def write(directory, config, tensors, shards=None):
    """Writes config.json and model.safetensors, or shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards is None:
        save_file(tensors, directory / "model.safetensors")
        return directory
    names, weight_map = list(tensors), {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = names[number::shards]
        save_file({name: tensors[name] for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
