import numpy as np
import pytest

from calyrex_jax.backbones.rope import inverse_frequencies
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.weights.sources import resolve
from tests.weights.checkpoints import D, F, H, K, L, N, P, V, config_for, random_tensors
from tests.weights.gguf_files import write_gguf


def _config(tmp_path, architecture="llama", **kwargs):
    return resolve(str(write_gguf(tmp_path / "a.gguf", architecture, **kwargs))).config


def test_llama(tmp_path):
    assert _config(tmp_path) == {
        "model_type": "llama",
        "vocab_size": V,  # the embedding's rows, whatever llama.vocab_size says
        "tie_word_embeddings": False,
        "eos_token_id": 2,
        "num_hidden_layers": L,
        "max_position_embeddings": P,
        "hidden_size": D,
        "intermediate_size": F,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "rms_norm_eps": 1e-6,  # stored as float32 9.99999997e-07
        "rope_theta": 5e5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def test_qwen2_and_gpt2_specs(tmp_path):
    spec = DecoderSpec.from_config(_config(tmp_path, "qwen2"))
    assert (spec.family, spec.qkv_bias, spec.tied, spec.rope.theta, spec.norm_eps) == ("qwen2", True, False, 5e5, 1e-6)
    spec = DecoderSpec.from_config(_config(tmp_path, "gpt2"))
    assert spec == DecoderSpec.from_config(config_for("gpt2"))


def test_a_tied_llama(tmp_path):
    tensors = random_tensors(config_for("llama", tie_word_embeddings=True))
    assert _config(tmp_path, tensors=tensors)["tie_word_embeddings"] is True


def test_stop_tokens(tmp_path):
    fields = {
        f"tokenizer.ggml.{name}_token_id": value for name, value in (("bos", 0), ("eos", 1), ("eot", 5), ("padding", 3))
    }
    source = resolve(str(write_gguf(tmp_path / "a.gguf", "llama", fields=fields)))
    assert source.generation_config == {"bos_token_id": 0, "eos_token_id": [1, 5], "pad_token_id": 3}


def test_explicit_head_width(tmp_path):
    tensors = random_tensors(config_for("llama", head_dim=6))
    fields = {"llama.attention.key_length": 6, "llama.attention.value_length": 6, "llama.rope.dimension_count": 6}
    assert _config(tmp_path, tensors=tensors, fields=fields)["head_dim"] == 6
    with pytest.raises(UserError, match="differ in width"):
        _config(tmp_path, tensors=tensors, fields=fields | {"llama.rope.dimension_count": 4})


def test_a_window_makes_it_mistral(tmp_path):
    config = _config(tmp_path, fields={"llama.attention.sliding_window": 8})
    assert DecoderSpec.from_config(config).windows == (8,) * L
    with pytest.raises(UserError, match="sliding_window"):
        _config(tmp_path, "qwen2", fields={"qwen2.attention.sliding_window": 8})


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({"scaling.type": "none"}, None),
        ({"scaling.type": "linear", "scaling.factor": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {
                "scaling.type": "yarn",
                "scaling.factor": 4.0,
                "scaling.original_context_length": 16,
                "scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        ),
    ],
)
def test_rotary_scaling(tmp_path, fields, scaling):
    config = _config(tmp_path, fields={f"llama.rope.{name}": value for name, value in fields.items()})
    assert config.get("rope_scaling") == scaling
    assert DecoderSpec.from_config(config).rope.kind == (scaling or {"rope_type": "default"})["rope_type"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"general.architecture": "phi3"}, None),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope' is not supported"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0},
            "without rope.scaling.original_context_length",
        ),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"llama\.rope\.scaling\.attn_factor are not understood"),
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.logit_scale": 2.0}, r"llama\.logit_scale are not understood"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": "three"}, "expected int"),
        ({"llama.attention.head_count_kv": [1, 2, 2]}, "differs from layer to layer"),
    ],
)
def test_what_is_not_understood_is_refused(tmp_path, fields, complaint):
    if complaint is None:
        with pytest.raises(UserError, match="architecture 'phi3' is not supported; known: llama, qwen2, gpt2"):
            resolve(str(write_gguf(tmp_path / "a.gguf", "phi3", tensors={})))
        return
    with pytest.raises(UserError, match=complaint):
        _config(tmp_path, fields=fields)


def test_equal_values_a_layer_are_one_value(tmp_path):
    assert _config(tmp_path, fields={"llama.attention.head_count_kv": [K] * L})["num_key_value_heads"] == K


def _llama3_divisors(theta, head_dim, factor, high=4.0):
    """llama.cpp's converter, written out."""
    divisors = []
    for frequency in 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim):
        wavelength = 2 * np.pi / frequency
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1.0) / (high - 1.0)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_read_from_its_divisors(tmp_path, factor):
    tensors = random_tensors(config_for("llama", head_dim=64))
    fields = {"llama.rope.dimension_count": 64}
    divisors = _llama3_divisors(5e5, 64, factor)
    assert len(set(divisors.tolist())) > 3  # some in between
    config = _config(tmp_path, tensors=tensors, fields=fields, extra={"rope_freqs.weight": divisors})
    spec = DecoderSpec.from_config(config)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.original_positions) == ("llama3", factor, 8192)
    plain = 5e5 ** -(np.arange(0, 64, 2) / 64)
    np.testing.assert_allclose(inverse_frequencies(spec.rope, 64), plain / divisors, rtol=1e-5)


def test_other_divisors_are_refused_and_ones_mean_none(tmp_path):
    tensors = random_tensors(config_for("llama", head_dim=64))
    kwargs = {"tensors": tensors, "fields": {"llama.rope.dimension_count": 64}}
    assert "rope_scaling" not in _config(tmp_path, **kwargs, extra={"rope_freqs.weight": np.ones(32, np.float32)})
    for divisors in (_llama3_divisors(5e5, 64, 8.0, high=2.0), np.full(32, 2.0, np.float32), np.ones(16, np.float32) * 3):
        with pytest.raises(UserError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
            _config(tmp_path, **kwargs, extra={"rope_freqs.weight": divisors})
    kwargs["fields"] |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(UserError, match="only one of them"):
        _config(tmp_path, **kwargs, extra={"rope_freqs.weight": _llama3_divisors(5e5, 64, 8.0)})
