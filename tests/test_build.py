"""What a run's adapters start from, and what distilled conversations teach them."""

import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import build, train
from calyrex_jax.backbones import decoder
from calyrex_jax.core.errors import UserError
from tests import tiny_runs
from tests.tiny_runs import make_config


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny_runs.furnish(tmp_path_factory.mktemp("starts"))


@pytest.fixture(scope="module")
def config(place):
    return lambda **changes: make_config(place / "model", changes.pop("data", place / "chats.jsonl"), **changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cal_starts_from_the_neighbouring_layers(config, dtype):
    """Boundary 3 takes layer 3, the last boundary the last layer; what is zero at initialisation stays zero."""
    made = config(backbone__dtype=dtype, cal__init="layer")
    run = build.open_run(made)
    backbone, fresh = build.load_weights(run), build.fresh_adapters(run)["cal"]
    taken = build.brought_adapters(run, backbone)["cal"]
    last = run.spec.num_layers - 1
    plain = decoder.unstack(backbone["layers"])
    for key, block in taken.items():
        layer = plain[min(int(key.split("_")[1]), last)]
        for name in ("w_q", "w_k", "w_v"):
            np.testing.assert_array_equal(block[name], np.asarray(layer["attn"][name], np.float32))
        np.testing.assert_array_equal(block["attn_norm"], np.asarray(layer["attn_norm"]["scale"], np.float32))
        assert not np.asarray(block["w_o"]).any() and not np.asarray(block["w_down"]).any()
        np.testing.assert_array_equal(block["w_gate"], fresh[key]["w_gate"])
        assert {leaf.dtype for leaf in jax.tree.leaves(block)} == {jnp.dtype(jnp.float32)}
    chex.assert_trees_all_equal(build.brought_adapters(run)["cal"], fresh)


def test_a_kernel_of_another_platform_is_refused_at_start_up(config):
    with pytest.raises(UserError, match=r"config\.attention=splash runs on TPUs, and this is for cpu"):
        build.open_run(config(attention="splash"))


def test_distilled_conversations_cost_nothing_at_initialisation(config, place, tmp_path):
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    corpus = tmp_path / "kept.jsonl"
    corpus.write_text("".join(json.dumps(row | {"distill": True}) + "\n" for row in rows))
    for packing in (False, True):
        run = tmp_path / f"run{packing}"
        assert train.train(config(data=corpus, data__packing=packing, train__steps=1), str(run)) == 0
        assert abs(tiny_runs.losses(run)[0]) < 1e-5  # later ones are not zero: Adam makes steps of any gradient's noise
