"""Weights against transformers: the same tensors from the same files, both ways."""

import shutil

import chex
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="parity with transformers needs torch")
transformers = pytest.importorskip("transformers")

from calyrex_jax.backbones import decoder  # noqa: E402
from calyrex_jax.backbones.spec import DecoderSpec  # noqa: E402
from calyrex_jax.core.trees import flatten  # noqa: E402
from calyrex_jax.weights.load import export_backbone, load_backbone  # noqa: E402
from calyrex_jax.weights.sources import resolve  # noqa: E402
from tests.weights.checkpoints import D, V, config_for, random_tensors  # noqa: E402
from tests.weights.gguf_files import write_gguf  # noqa: E402

_COMMON = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 64,
}
_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**_COMMON, head_dim=10, attention_bias=True, mlp_bias=True),
    "llama tied": lambda: transformers.LlamaConfig(**_COMMON, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "mistral": lambda: transformers.MistralConfig(**_COMMON, sliding_window=16),
    "gpt2": lambda: transformers.GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=70),
    "gpt2 untied": lambda: transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=70, tie_word_embeddings=False
    ),
}


def _model(name, dtype=torch.float32):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[name]()).eval()
    with torch.no_grad():  # biases and norm scales start at constants, which would hide a mix-up
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def _numpy(tensor):
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _expected(model):
    """Leaves by path, through the modules' attributes rather than through names."""
    config, heads = model.config, {"q": model.config.num_attention_heads}
    heads |= dict.fromkeys("kv", getattr(config, "num_key_value_heads", None) or heads["q"])
    tree = {}

    def put(path, tensor):
        tree.setdefault(path, []).append(_numpy(tensor.detach()))

    def linear(leaf, module, suffix, shape, out):
        put(f"layers/{leaf}/w_{suffix}", module.weight.T.reshape(shape))
        if module.bias is not None:
            put(f"layers/{leaf}/b_{suffix}", module.bias.reshape(out))

    if config.model_type == "gpt2":
        body, n = model.transformer, heads["q"]
        for block in body.h:
            weights, biases = block.attn.c_attn.weight.split(32, dim=1), block.attn.c_attn.bias.split(32)
            for x, weight, bias in zip("qkv", weights, biases, strict=True):
                put(f"layers/attn/w_{x}", weight.reshape(32, n, -1))
                put(f"layers/attn/b_{x}", bias.reshape(n, -1))
            put("layers/attn/w_o", block.attn.c_proj.weight.reshape(n, -1, 32))
            put("layers/attn/b_o", block.attn.c_proj.bias)
            for x, module in (("up", block.mlp.c_fc), ("down", block.mlp.c_proj)):
                put(f"layers/mlp/w_{x}", module.weight)
                put(f"layers/mlp/b_{x}", module.bias)
            for x, module in (("attn_norm", block.ln_1), ("mlp_norm", block.ln_2)):
                put(f"layers/{x}/scale", module.weight)
                put(f"layers/{x}/bias", module.bias)
        whole = {"embed/tokens": body.wte.weight, "embed/positions": body.wpe.weight}
        whole |= {"final_norm/scale": body.ln_f.weight, "final_norm/bias": body.ln_f.bias}
    else:
        body = model.model
        for block in body.layers:
            attn, width = block.self_attn, block.self_attn.head_dim
            for x in "qkv":
                linear("attn", getattr(attn, f"{x}_proj"), x, (32, heads[x], width), (heads[x], width))
            linear("attn", attn.o_proj, "o", (heads["q"], width, 32), (32,))
            for x in ("gate", "up", "down"):
                module = getattr(block.mlp, f"{x}_proj")
                linear("mlp", module, x, module.weight.T.shape, module.weight.shape[:1])
            put("layers/attn_norm/scale", block.input_layernorm.weight)
            put("layers/mlp_norm/scale", block.post_attention_layernorm.weight)
        whole = {"embed/tokens": body.embed_tokens.weight, "final_norm/scale": body.norm.weight}
    if not config.tie_word_embeddings:
        whole["head/w"] = model.lm_head.weight
    leaves = {path: np.stack(parts) for path, parts in tree.items()}
    return leaves | {path: _numpy(tensor.detach()) for path, tensor in whole.items()}


def _load(source, dtype):
    return load_backbone(source, DecoderSpec.from_config(source.config), dtype)


@pytest.mark.parametrize("max_shard_size", ["10GB", "20KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", _CONFIGS)
def test_leaves_are_the_modules_weights(tmp_path, name, dtype, max_shard_size):
    model = _model(name, getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    source = resolve(str(tmp_path))
    assert (len(source.weight_files) > 1) == (max_shard_size == "20KB")
    got, expected = flatten(_load(source, dtype)), _expected(model)
    assert got.keys() == expected.keys()
    for path, leaf in got.items():
        assert leaf.dtype == dtype
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), expected[path], err_msg=path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", _CONFIGS)
def test_transformers_loads_what_is_exported(tmp_path, name, dtype):
    model = _model(name, getattr(torch, dtype))
    model.save_pretrained(tmp_path / "in")
    source = resolve(str(tmp_path / "in"))
    spec = DecoderSpec.from_config(source.config)
    export_backbone(_load(source, "bfloat16" if dtype == "bfloat16" else "float32"), spec, tmp_path / "out", dtype)
    back, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert back.dtype == getattr(torch, dtype)
    for key, value in model.state_dict().items():
        assert torch.equal(back.state_dict()[key], value), key
    if dtype == "float32":  # Module.to has rounded the other models' rotary frequencies too
        tokens = torch.arange(20)[None]
        assert torch.equal(back(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", _CONFIGS)
def test_logits_of_a_loaded_checkpoint(tmp_path, name):
    model = _model(name)
    model.save_pretrained(tmp_path)
    source = resolve(str(tmp_path))
    spec = DecoderSpec.from_config(source.config)
    backbone = _load(source, "float32")
    tokens = np.random.default_rng(0).integers(0, 70, (2, 24))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    positions = jnp.broadcast_to(jnp.arange(24), tokens.shape)
    context = decoder.make_context(spec, positions, jnp.ones_like(positions))
    x = decoder.embed(spec, backbone, jnp.asarray(tokens), positions)
    x, _ = decoder.run_layers(spec, backbone["layers"], x, context, 0, spec.num_layers)
    got = np.asarray(decoder.logits(spec, backbone, decoder.final_norm(spec, backbone, x)))
    assert np.abs(got - expected).max() <= 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_tiny_gguf_files_load_as_transformers_loads_them(tmp_path, architecture):
    fields = {"general.name": "tiny", "tokenizer.ggml.tokens": [f"t{i}" for i in range(V)]}
    tensors = random_tensors(config_for(architecture))
    if architecture == "gpt2":  # whose mlp and positions transformers does not read from the file
        fields |= {"gpt2.feed_forward_length": 4 * D, "gpt2.context_length": 1024}
        sizes = {"c_fc.weight": (D, 4 * D), "c_fc.bias": (4 * D,), "mlp.c_proj.weight": (4 * D, D), "wpe.weight": (1024, D)}
        for name in tensors:
            for end in sizes:
                if name.endswith(end):
                    tensors[name] = np.random.default_rng(1).normal(size=sizes[end]).astype(np.float32)
    else:
        fields[f"{architecture}.vocab_size"] = V
    write_gguf(tmp_path / "a.gguf", architecture, tensors, fields)
    source = resolve(str(tmp_path / "a.gguf"))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    export_backbone(_load(source, "float32"), DecoderSpec.from_config(source.config), tmp_path / "out")
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = model.state_dict()
    for key, value in ours.state_dict().items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.slow
def test_smollm2_loads_as_transformers_loads_it(smollm2_source, tmp_path):
    path = smollm2_source.path
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    backbone = _load(smollm2_source, "float32")
    spec = DecoderSpec.from_config(smollm2_source.config)
    export_backbone(backbone, spec, tmp_path)
    with np.errstate(all="raise"):
        chex.assert_trees_all_equal(_load(resolve(str(tmp_path)), "float32"), backbone)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    shutil.rmtree(tmp_path)
    theirs = model.state_dict()
    assert ours.state_dict().keys() == theirs.keys()
    for key, value in ours.state_dict().items():
        assert torch.equal(value, theirs[key]), key
    ids = torch.tensor([[1, 4093, 198, 1780, 253, 2, 198, 1, 520, 9531, 198]])
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, model(ids).logits)
