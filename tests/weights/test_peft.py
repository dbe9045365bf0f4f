"""PEFT's files without peft: a roundtrip, and every way in which they do not fit."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.weights import peft
from tests import tiny

VARIANTS = {
    "llama": ("llama", {}),
    "ranks": ("llama", {"ranks": {"attn/w_q": 4, "attn/w_k": 4}, "rslora": True}),
    "range": ("llama", {"layers": range(1, 3)}),
    "gpt2": ("gpt2", {"ranks": {"attn/w_qkv": 4, "mlp/w_down": 4}}),
}


def saved(directory, variant="llama"):
    family, changes = VARIANTS[variant]
    spec = tiny.spec(family)
    adapter = tiny.lora(spec, 3, **changes)
    leaves = tiny.noise(jax.eval_shape(adapter.init, jax.random.key(0)), 1, 0.3)
    peft.save_peft(directory, spec, adapter.low_rank, leaves, base="someone/tiny")
    return spec, adapter.low_rank, leaves


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_was_saved_is_read_back(variant, tmp_path):
    spec, low_rank, leaves = saved(tmp_path / "a" / "b", variant)
    assert peft.is_peft(tmp_path / "a" / "b") and not peft.is_peft(tmp_path)
    found, read = peft.load_peft(tmp_path / "a" / "b", spec)
    assert found == low_rank == peft.ranks_of(tmp_path / "a" / "b", spec)
    assert trees.match(leaves, read, "it") == []
    for path, leaf in trees.flatten(read).items():
        np.testing.assert_array_equal(leaf, trees.flatten(leaves)[path], err_msg=path)


def test_the_files_are_as_peft_writes_them(tmp_path):
    saved(tmp_path, "ranks")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == [f"{x}_proj" for x in ("q", "k", "v", "o", "gate", "up", "down")]
    assert (config["r"], config["rank_pattern"]) == (3, {"q_proj": 4, "k_proj": 4})
    assert (config["lora_alpha"], config["use_rslora"], config["layers_to_transform"]) == (6.0, True, None)
    assert (config["fan_in_fan_out"], config["base_model_name_or_path"]) == (False, "someone/tiny")
    shapes = {name: value.shape for name, value in load_file(tmp_path / "adapter_model.safetensors").items()}
    assert len(shapes) == 4 * 7 * 2
    assert shapes["base_model.model.model.layers.3.self_attn.k_proj.lora_A.weight"] == (4, 32)
    assert shapes["base_model.model.model.layers.3.self_attn.k_proj.lora_B.weight"] == (16, 4)
    saved(tmp_path, "gpt2")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"] and config["fan_in_fan_out"]
    saved(tmp_path, "range")
    assert json.loads((tmp_path / "adapter_config.json").read_text())["layers_to_transform"] == [1, 2]


def test_missing_unexpected_and_misshapen_tensors_are_listed_at_once(tmp_path):
    spec, *_ = saved(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    layer = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
    del tensors[layer.format(0, "q", "A")], tensors[layer.format(1, "q", "A")]
    tensors["base_model.model.lm_head.lora_A.weight"] = np.zeros((3, 32), np.float32)
    tensors[layer.format(2, "v", "B")] = np.zeros((15, 3), np.float32)
    save_file(tensors, file)
    with pytest.raises(UserError) as caught:
        peft.load_peft(tmp_path, spec)
    for part in (
        "missing: base_model.model.model.layers.{0-1}.self_attn.q_proj.lora_A.weight",
        "unexpected: base_model.model.lm_head.lora_A.weight",
        "misshapen: " + layer.format(2, "v", "B") + " (has (15, 3), expected (16, 3))",
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def edit(**fields):
    return lambda config: config.update(fields)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (edit(peft_type="IA3"), "peft_type must be LORA"),
        (edit(use_dora=True), "sets use_dora=True, which is not computed here"),
        (edit(bias="all"), "sets bias='all'"),
        (edit(modules_to_save=["lm_head"]), "sets modules_to_save"),
        (edit(init_lora_weights="pissa"), "sets init_lora_weights='pissa'"),
        (edit(some_new_option=3), "sets some_new_option=3"),
        (lambda config: config.pop("r"), "lacks r"),
        (edit(target_modules=["qkv"]), r"target_modules \['qkv'\] name no map of llama"),
        (edit(rank_pattern={"layers.1.self_attn.q_proj": 4}), r"rank_pattern gives .*q_proj \[3, 4\] in different layers"),
        (edit(alpha_pattern={"q_proj": 4}), "alpha_pattern gives several alphas"),
        (edit(layers_to_transform=[0, 2]), "the layers it changes are not one range"),
        (edit(r=5), "misshapen: "),
    ],
)
def test_a_config_that_asks_for_something_else(change, said, tmp_path):
    spec, *_ = saved(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    change(config)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said) as caught:
        peft.load_peft(tmp_path, spec)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_patterns_name_modules_as_peft_reads_them(tmp_path):
    spec, low_rank, _ = saved(tmp_path, "ranks")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    config["rank_pattern"] = {r".*\.(q|k)_proj": 4}
    config["target_modules"] = r".*\.(self_attn|mlp)\.\w+_proj"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert peft.load_peft(tmp_path, spec)[0] == low_rank


def test_files_that_are_not_there(tmp_path):
    spec, *_ = saved(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has adapter_config\.json but no adapter_model\.safetensors"):
        peft.load_peft(tmp_path, spec)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        peft.load_peft(tmp_path, spec)
    with pytest.raises(UserError, match="cannot be written"):
        peft.save_peft(tmp_path / "adapter_config.json" / "below", spec, *saved(tmp_path)[1:])
