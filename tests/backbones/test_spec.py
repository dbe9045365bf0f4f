import jax.numpy as jnp
import pytest

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.named import NAMED, named_spec
from calyrex_jax.backbones.rope import RopeSpec
from calyrex_jax.backbones.spec import DecoderSpec, check_length, check_tokens
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.trees import count, flatten

LLAMA, MISTRAL, GPT2 = NAMED["Llama-3.1-8B"], NAMED["Mistral-7B-v0.2"], NAMED["GPT-2"]
QWEN2 = NAMED["Qwen2-1.5B"]


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Llama-3.2-3B", 3_212_749_824),
        ("Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen2-1.5B", 1_543_714_304),
        ("Mistral-7B-v0.2", 7_241_732_096),
        ("GPT-2", 124_439_808),
        ("SmolLM2-135M", 134_515_008),
    ],
)
def test_named_models_have_their_published_number_of_parameters(name, parameters):
    assert count(abstract_params(named_spec(name), jnp.bfloat16)) == parameters


def test_abstract_tree_of_llama():
    shapes = {path: leaf.shape for path, leaf in flatten(abstract_params(named_spec("Llama-3.1-8B"), jnp.bfloat16)).items()}
    assert shapes == {
        "embed/tokens": (128256, 4096),
        "final_norm/scale": (4096,),
        "head/w": (128256, 4096),
        "layers/attn/w_q": (32, 4096, 32, 128),
        "layers/attn/w_k": (32, 4096, 8, 128),
        "layers/attn/w_v": (32, 4096, 8, 128),
        "layers/attn/w_o": (32, 32, 128, 4096),
        "layers/attn_norm/scale": (32, 4096),
        "layers/mlp/w_gate": (32, 4096, 14336),
        "layers/mlp/w_up": (32, 4096, 14336),
        "layers/mlp/w_down": (32, 14336, 4096),
        "layers/mlp_norm/scale": (32, 4096),
    }


def test_unknown_model_name_lists_the_known_ones():
    with pytest.raises(UserError, match=r"Llama-9.*known: Llama-3\.1-8B"):
        named_spec("Llama-9")


def test_llama3_rope_is_read_in_both_forms():
    expected = RopeSpec(5e5, "llama3", 8.0, 8192, 1.0, 4.0)
    scaling = LLAMA["rope_scaling"]
    assert DecoderSpec.from_config(LLAMA).rope == expected
    older = {**without(scaling, "rope_type"), "type": "llama3"}
    assert DecoderSpec.from_config({**LLAMA, "rope_scaling": older}).rope == expected
    newer = {**without(LLAMA, "rope_theta", "rope_scaling"), "rope_parameters": {**scaling, "rope_theta": 5e5}}
    assert DecoderSpec.from_config(newer).rope == expected


def test_missing_theta_means_10000_only_before_the_field_existed():
    assert DecoderSpec.from_config(without(LLAMA, "rope_theta", "rope_scaling")).rope == RopeSpec(1e4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope' is not supported; known: default, linear"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_type is missing"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_type": "dynamic"}}, "contradict"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0}}, "low_freq_factor not understood"),
        (
            {"rope_scaling": without(LLAMA["rope_scaling"], "original_max_position_embeddings")},
            "original_max_position.* is missing",
        ),
        ({"rope_scaling": without(LLAMA["rope_scaling"], "low_freq_factor")}, "low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA["rope_scaling"], "high_freq_factor": 1.0}}, "must exceed"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 9}}, "is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_theta is 500000 but"),
        ({"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": None}, "rope_theta is missing"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "contradict"),
        ({"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "per layer type"),
        ({"rope_scaling": [1]}, "expected a JSON object, got list"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["sliding_attention"] * 32}, "attends the same way"),
        ({"hidden_act": "xielu"}, "'xielu' is not supported; known: silu"),
        ({"attention_bias": "false"}, "expected true or false"),
        ({"num_key_value_heads": 5}, "not a multiple"),
        ({"num_hidden_layers": 0}, "at least 1"),
        ({"num_hidden_layers": 2.5}, "at least 1"),
        ({"num_hidden_layers": True}, "at least 1"),
        ({"head_dim": 3}, "even"),
        ({"head_dim": None, "num_attention_heads": 24}, "not a multiple of num_attention_heads 24"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"rope_interleaved": True}, "interleaved"),
        ({"model_type": "gemma2"}, "'gemma2' is not supported; known: gpt2, llama, mistral, qwen2"),
        ({"model_type": None}, "known: gpt2, llama, mistral, qwen2"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(change, message):
    with pytest.raises(UserError, match=f"^somewhere.*{message}"):
        DecoderSpec.from_config({**LLAMA, **change}, "somewhere")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**MISTRAL, "attention_bias": True}, "mistral has no biases"),
        ({**MISTRAL, "sliding_window": 0}, "sliding_window is 0"),
        ({**QWEN2, "attention_bias": False}, "always has q, k and v biases"),
        ({**QWEN2, "layer_types": ["full_attention"]}, "for each of 28 layers"),
        ({**QWEN2, "layer_types": ["sliding_attention"] * 28}, "use_sliding_window is false"),
        ({**QWEN2, "max_window_layers": -1}, "max_window_layers is -1"),
        ({**QWEN2, "rope_scaling": {"type": "mrope", "mrope_section": [1]}}, "'mrope' is not supported"),
        ({**GPT2, "add_cross_attention": True}, "add_cross_attention"),
        ({**GPT2, "activation_function": "gelu_10"}, "'gelu_10' is not supported"),
        ({**GPT2, "n_head": 7}, "n_embd 768 is not a multiple of n_head 7"),
        ("text", "expected a JSON object, got str"),
    ],
)
def test_other_families_refuse_too(config, message):
    with pytest.raises(UserError, match=message):
        DecoderSpec.from_config(config)


def test_windows():
    assert DecoderSpec.from_config(MISTRAL).windows == (None,) * 32
    assert DecoderSpec.from_config({**MISTRAL, "sliding_window": 7}).windows == (7,) * 32
    assert DecoderSpec.from_config(without(MISTRAL, "sliding_window")).windows == (4096,) * 32
    assert DecoderSpec.from_config({**QWEN2, "sliding_window": 4096, "max_window_layers": 0}).windows == (None,) * 28
    used = {**QWEN2, "sliding_window": 7, "max_window_layers": 26, "use_sliding_window": True}
    assert DecoderSpec.from_config(used).windows == (None,) * 26 + (7, 7)


def test_tied_head_follows_the_architecture_where_the_flag_is_missing():
    assert not DecoderSpec.from_config(without(LLAMA, "tie_word_embeddings")).tied
    assert not DecoderSpec.from_config(without(QWEN2, "tie_word_embeddings")).tied
    assert DecoderSpec.from_config(without(GPT2, "tie_word_embeddings")).tied


def test_head_dim_is_honoured_and_derived_where_null_or_absent():
    assert DecoderSpec.from_config({**LLAMA, "head_dim": 64}).head_dim == 64
    assert DecoderSpec.from_config({**LLAMA, "head_dim": None}).head_dim == 128
    assert DecoderSpec.from_config(without(LLAMA, "head_dim")).head_dim == 128


def test_specs_are_hashable_and_equal_by_value():
    assert hash(named_spec("Qwen2-1.5B")) == hash(DecoderSpec.from_config(dict(QWEN2)))


def test_learned_positions_end_and_rotary_ones_do_not():
    check_length(named_spec("GPT-2"), 1024, "prompt")
    check_length(named_spec("SmolLM2-135M"), 10**6, "prompt")
    with pytest.raises(UserError, match=r"chats.jsonl:3: 1025 tokens.*1024 positions"):
        check_length(named_spec("GPT-2"), 1025, "chats.jsonl:3")


@pytest.mark.parametrize("token", [-1, 50257])
def test_ids_beyond_the_embedding_are_refused(token):
    check_tokens(named_spec("GPT-2"), 50256, "prompt")
    with pytest.raises(UserError, match=f"token id {token}.*50257"):
        check_tokens(named_spec("GPT-2"), token, "prompt")
