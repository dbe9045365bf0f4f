"""Logits of random small checkpoints against transformers, for every family and every option of its config."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity is checked against transformers' torch models")
transformers = pytest.importorskip("transformers", reason="parity is checked against transformers' torch models")

from calyrex_jax.backbones import decoder  # noqa: E402
from calyrex_jax.backbones.spec import DecoderSpec  # noqa: E402
from calyrex_jax.core.trees import match, unflatten  # noqa: E402

BASE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA, QWEN2, MISTRAL = ({**BASE, "model_type": name} for name in ("llama", "qwen2", "mistral"))
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 97,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 160,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}

CASES = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama-one-kv-head": {**LLAMA, "num_key_value_heads": 1},
    "llama-no-groups": {**LLAMA, "num_key_value_heads": None},
    "llama-head-dim": {**LLAMA, "head_dim": 12},
    "llama-head-dim-null": {**LLAMA, "head_dim": None},
    "llama-biases": {**LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama-gelu": {**LLAMA, "hidden_act": "gelu"},
    "llama-no-theta": {name: value for name, value in LLAMA.items() if name != "rope_theta"},
    "llama-linear": {**LLAMA, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-dynamic": {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "llama-llama3": {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "llama-yarn": {**LLAMA, "rope_scaling": YARN},
    "llama-yarn-factor": {**LLAMA, "rope_scaling": {**YARN, "attention_factor": 1.3}},
    "llama-yarn-betas": {**LLAMA, "rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}},
    "llama-yarn-mscale": {**LLAMA, "rope_scaling": {**YARN, "mscale": 1.5, "mscale_all_dim": 0.5}},
    "llama-new-form": {
        **{name: value for name, value in LLAMA.items() if name != "rope_theta"},
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 7e4, **LLAMA3},
    },
    "qwen2": {**QWEN2, "rope_theta": 1e6},
    "qwen2-tied": {**QWEN2, "tie_word_embeddings": True},
    "qwen2-window-unused": {**QWEN2, "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0},
    "qwen2-windows": {**QWEN2, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
    "qwen2-layer-types": {
        **QWEN2,
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen2-yarn": {**QWEN2, "rope_scaling": YARN},
    "mistral": {**MISTRAL, "sliding_window": None},
    "mistral-window": {**MISTRAL, "sliding_window": 11},
    "mistral-window-absent": MISTRAL,
    "mistral-head-dim": {**MISTRAL, "head_dim": 16, "sliding_window": None},
    "mistral-dynamic": {**MISTRAL, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
    "gpt2": GPT2,
    "gpt2-inner": {**GPT2, "n_inner": 40, "activation_function": "relu"},
    "gpt2-untied": {**GPT2, "tie_word_embeddings": False},
    "gpt2-unscaled": {**GPT2, "scale_attn_weights": False},
    "gpt2-by-layer": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
}


def reference_model(config, seed=0):
    """A transformers model whose every parameter is far enough from its initial value to matter."""
    known = transformers.AutoConfig.for_model(**copy.deepcopy(config))
    known._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(known).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith("weight") and parameter.ndim == 1
            parameter.copy_(1 + 0.2 * noise if is_norm else 0.25 * noise)
    return model


def tree_of(model, spec):
    """The backbone's tree from a transformers state_dict."""
    state = {
        name.removeprefix("model.").removeprefix("transformer."): value.numpy() for name, value in model.state_dict().items()
    }
    leaves = _gpt2_leaves(state, spec) if spec.family == "gpt2" else _llama_leaves(state, spec)
    if not spec.tied:
        leaves["head/w"] = state["lm_head.weight"]
    return unflatten({path: jnp.asarray(leaf) for path, leaf in leaves.items()})


def _llama_leaves(state, spec):
    def stack(name, shape, bias=False):
        suffix = "bias" if bias else "weight"
        arrays = [state[f"layers.{layer}.{name}.{suffix}"] for layer in range(spec.num_layers)]
        return np.stack([array.T.reshape(shape) for array in arrays])

    d, f, n, k, h = spec.embed_dim, spec.mlp_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim
    shapes = {
        "attn/{}_q": ("self_attn.q_proj", (d, n, h)),
        "attn/{}_k": ("self_attn.k_proj", (d, k, h)),
        "attn/{}_v": ("self_attn.v_proj", (d, k, h)),
        "attn/{}_o": ("self_attn.o_proj", (n, h, d)),
        "mlp/{}_gate": ("mlp.gate_proj", (d, f)),
        "mlp/{}_up": ("mlp.up_proj", (d, f)),
        "mlp/{}_down": ("mlp.down_proj", (f, d)),
    }
    leaves = {"embed/tokens": state["embed_tokens.weight"], "final_norm/scale": state["norm.weight"]}
    leaves["layers/attn_norm/scale"] = stack("input_layernorm", (d,))
    leaves["layers/mlp_norm/scale"] = stack("post_attention_layernorm", (d,))
    for path, (name, shape) in shapes.items():
        leaves["layers/" + path.format("w")] = stack(name, shape)
        if f"layers.0.{name}.bias" in state:
            out = (d,) if name.endswith("o_proj") else shape[1:]
            leaves["layers/" + path.format("b")] = stack(name, out, bias=True)
    return leaves


def _gpt2_leaves(state, spec):
    def stack(name):
        return np.stack([state[f"h.{layer}.{name}"] for layer in range(spec.num_layers)])

    count, d, n, h = spec.num_layers, spec.embed_dim, spec.num_heads, spec.head_dim
    leaves = {
        "embed/tokens": state["wte.weight"],
        "embed/positions": state["wpe.weight"],
        "final_norm/scale": state["ln_f.weight"],
        "final_norm/bias": state["ln_f.bias"],
        "layers/attn/w_o": stack("attn.c_proj.weight").reshape(count, n, h, d),
        "layers/attn/b_o": stack("attn.c_proj.bias"),
    }
    for index, part in enumerate("qkv"):
        leaves[f"layers/attn/w_{part}"] = np.split(stack("attn.c_attn.weight"), 3, -1)[index].reshape(count, d, n, h)
        leaves[f"layers/attn/b_{part}"] = np.split(stack("attn.c_attn.bias"), 3, -1)[index].reshape(count, n, h)
    for ours, theirs in (("attn_norm", "ln_1"), ("mlp_norm", "ln_2")):
        leaves[f"layers/{ours}/scale"], leaves[f"layers/{ours}/bias"] = stack(f"{theirs}.weight"), stack(f"{theirs}.bias")
    for ours, theirs in (("up", "c_fc"), ("down", "c_proj")):
        leaves[f"layers/mlp/w_{ours}"], leaves[f"layers/mlp/b_{ours}"] = (
            stack(f"mlp.{theirs}.weight"),
            stack(f"mlp.{theirs}.bias"),
        )
    return leaves


def our_logits(spec, tree, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    context = decoder.make_context(spec, positions, jnp.ones_like(positions))
    x = decoder.embed(spec, tree, jnp.asarray(tokens), positions)
    x, _ = decoder.run_layers(spec, tree["layers"], x, context, 0, spec.num_layers)
    return np.asarray(decoder.logits(spec, tree, decoder.final_norm(spec, tree, x)))


def their_logits(model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


def assert_parity(config, length, batch=2, tolerance=1e-4):
    model = reference_model(config)
    spec = DecoderSpec.from_config(config)
    tree = tree_of(model, spec)
    assert match(decoder.abstract_params(spec, jnp.float32), tree, "tree") == []
    tokens = np.random.default_rng(1).integers(0, spec.vocab_size, (batch, length))
    want, got = their_logits(model, tokens), our_logits(spec, tree, tokens)
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
    # what transformers writes back into a config.json, in its newest form, describes the same backbone
    assert DecoderSpec.from_config(model.config.to_dict()) == spec


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name):
    assert_parity(CASES[name], length=150)


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-yarn", "llama-llama3"])
def test_scalings_agree_below_their_limit_too(name):
    assert_parity(CASES[name], length=20)


@pytest.mark.slow
def test_llama3_scaling_agrees_beyond_8192_positions():
    scaling = {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 8192}
    config = {**LLAMA, "num_hidden_layers": 2, "max_position_embeddings": 131072, "rope_theta": 5e5, "rope_scaling": scaling}
    assert_parity(config, length=8500, batch=1)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_windows_agree_when_queries_are_processed_in_chunks(family):
    options = {"sliding_window": 700, "use_sliding_window": True, "max_window_layers": 1}
    config = {**BASE, "model_type": family, "num_hidden_layers": 2, "max_position_embeddings": 4096, **options}
    if family == "mistral":
        config = {**config, "use_sliding_window": None, "max_window_layers": None}
    assert_parity(config, length=2100, batch=1)
