import re

import numpy as np
import pytest

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.trees import flatten
from calyrex_jax.weights import mapping
from calyrex_jax.weights.config import config_from_spec
from tests.weights.checkpoints import config_for, shapes_for

VARIANTS = {
    "llama": {},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"head_dim": 6},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "mistral": {"sliding_window": None},
    "gpt2": {},
}


def _variant(name):
    return config_for(name.split()[0], **VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_table_names_and_shapes_every_tensor_of_a_checkpoint(name):
    config = _variant(name)
    spec = DecoderSpec.from_config(config)
    abstract = flatten(abstract_params(spec, "float32"))
    expected = {}
    for path, row in mapping.rows_for("directory", spec, abstract).items():
        shape = abstract[path].shape
        if path.startswith("layers/"):
            expected |= {row.name.format(i): mapping.stored_shape(row, shape[1:]) for i in range(shape[0])}
        else:
            expected[row.name] = mapping.stored_shape(row, shape)
    assert expected == shapes_for(config)


@pytest.mark.parametrize("key", mapping.TABLE, ids=str)
def test_no_leaf_has_two_rows_and_no_tensor_is_claimed_twice(key):
    rows = mapping.TABLE[key]
    assert len({row.path for row in rows}) == len(rows)
    assert len({(row.name, row.third) for row in rows}) == len(rows)


def test_places_of_a_head_sharded_block():
    row = mapping.Row("q", "layers/attn/w_q", transposed=True)
    inner, outer = mapping.stored_places(row, (3, 4, 2), (slice(1, 3), slice(2, 4), slice(0, 2)))
    assert inner.tolist() == [1, 2]
    assert outer.tolist() == [4, 5, 6, 7]


def test_interleaved_rows_go_back_to_halves():
    # one head of width 6: llama.cpp stores rows 0 3 1 4 2 5 of the original
    row = mapping.Row("q", "layers/attn/w_q", transposed=True, interleaved=True)
    _, outer = mapping.stored_places(row, (2, 1, 6), (slice(0, 2), slice(0, 1), slice(0, 6)))
    stored = np.array([0, 3, 1, 4, 2, 5])
    assert stored[outer].tolist() == [0, 1, 2, 3, 4, 5]


def test_only_the_known_buffers_are_passed_over():
    assert mapping.is_buffer("directory", "gpt2", "h.0.attn.bias")
    assert mapping.is_buffer("directory", "gpt2", "transformer.h.11.attn.masked_bias")
    assert not mapping.is_buffer("directory", "gpt2", "h.0.attn.c_attn.bias")
    assert not mapping.is_buffer("directory", "gpt2", "h.0.attn.scale")
    assert mapping.is_buffer("directory", "llama", "model.layers.3.self_attn.rotary_emb.inv_freq")
    assert not mapping.is_buffer("directory", "llama", "h.0.attn.bias")
    assert not mapping.is_buffer("gguf", "gpt2", "rope_freqs.weight")


def test_mismatches_are_listed_at_once_with_layers_joined():
    expected = {f"model.layers.{i}.q": (2, 2) for i in range(4)} | {"model.norm.weight": (2,)}
    found = {"model.layers.0.q": (2, 3), "model.layers.2.q": (2, 2), "model.norm.weight": (2,), "extra": (1,)}
    stored, lines = mapping.mismatches("directory", "llama", expected, found)
    assert stored["model.norm.weight"] == "model.norm.weight"
    assert lines == [
        "missing: model.layers.{1,3}.q",
        "unexpected: extra",
        "misshapen: model.layers.0.q (has (2, 3), expected (2, 2))",
    ]


def test_compress_leaves_numbers_outside_layers_alone():
    assert mapping.compress(["blk.10.a", "blk.11.a", "blk.2.a"]) == "blk.{2,10-11}.a"
    assert re.fullmatch("x1", mapping.compress(["x1"]))


@pytest.mark.parametrize(
    "config",
    [
        *(_variant(name) for name in VARIANTS),
        config_for("llama", rope_scaling={"rope_type": "linear", "factor": 2.0}),
        config_for("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        config_for("llama", rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}),
        config_for(
            "llama",
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        ),
        config_for("mistral", sliding_window=8),
        config_for("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1),
        config_for("gpt2", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True, tie_word_embeddings=False),
    ],
)
def test_a_spec_written_as_config_reads_back(config):
    spec = DecoderSpec.from_config(config)
    assert DecoderSpec.from_config(config_from_spec(spec)) == spec
