"""LoRA's own parts: ranks from a budget, layers from a name, initialisation, the merge."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters import lora
from calyrex_jax.adapters.lora import Lora, layer_range, matched_ranks
from calyrex_jax.core import numerics, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.lowrank import LowRank, rank_parameters
from calyrex_jax.weights import peft
from tests import tiny

SMALL = {"a": ((10,), (10,)), "b": ((10,), (30,)), "c": ((10,), (5, 5))}  # 20, 40 and 35 parameters a rank


def test_the_tree_follows_the_backbones_maps():
    leaves = trees.flatten(tiny.lora(tiny.spec(), 3).init(jax.random.key(0)))
    assert {path.rsplit("/", 1)[0] for path in leaves} == {
        *(f"attn/w_{x}" for x in "qkvo"),
        *(f"mlp/w_{x}" for x in ("gate", "up", "down")),
    }
    assert leaves["attn/w_q/a"].shape == (4, 32, 3) and leaves["attn/w_q/b"].shape == (4, 3, 4, 8)
    assert leaves["attn/w_k/b"].shape == (4, 3, 2, 8)
    assert leaves["attn/w_o/a"].shape == (4, 4, 8, 3) and leaves["attn/w_o/b"].shape == (4, 3, 32)
    assert leaves["mlp/w_down/a"].shape == (4, 48, 3)


def test_gpt2s_three_maps_share_one_a():
    leaves = trees.flatten(tiny.lora(tiny.spec("gpt2"), 3, layers=range(1, 3)).init(jax.random.key(0)))
    assert {path.rsplit("/", 1)[0] for path in leaves} == {"attn/w_qkv", "attn/w_o", "mlp/w_up", "mlp/w_down"}
    assert leaves["attn/w_qkv/a"].shape == (2, 32, 3) and leaves["attn/w_qkv/b"].shape == (2, 3, 3, 4, 8)


def test_a_starts_uniform_as_pefts_and_b_at_zero():
    leaves = trees.flatten(tiny.lora(tiny.spec(), 16).init(jax.random.key(0)))
    for path, leaf in leaves.items():
        assert leaf.dtype == jnp.float32
        if path.endswith("/b"):
            assert not np.asarray(leaf).any(), path
            continue
        bound = 48**-0.5 if "w_down" in path else 32**-0.5
        assert np.abs(leaf).max() <= bound
        assert float(leaf.std()) == pytest.approx(bound / 3**0.5, rel=0.05), path
    assert (leaves["attn/w_q/a"] != leaves["attn/w_k/a"]).any()
    assert (leaves["attn/w_q/a"][0] != leaves["attn/w_q/a"][1]).any()


@pytest.mark.parametrize(
    ("budget", "layers", "expected"),
    [
        (95 * 6, 1, (6, 6, 6)),
        (95 * 6 + 3, 1, (6, 6, 6)),  # within 1 %
        (2 * (95 * 3 + 20), 2, (4, 3, 3)),  # the first kind
        (95 * 3 + 62, 1, (4, 4, 3)),  # the first two
        (95 * 3 + 35, 1, (3, 3, 4)),  # no number of first kinds comes near: the set that does
        (95 * 3 + 75, 1, (3, 4, 4)),
    ],
)
def test_ranks_from_a_budget(budget, layers, expected):
    found = matched_ranks(budget, SMALL, tuple(SMALL), layers)
    assert tuple(found.values()) == expected
    size = layers * sum(rank * rank_parameters(SMALL, kind) for kind, rank in found.items())
    assert abs(size / budget - 1) <= 0.01


@pytest.mark.parametrize("budget", [30, 95 + 10])
def test_a_budget_that_no_rank_meets(budget):
    with pytest.raises(UserError, match=rf"lora\.rank: no rank gives CAL's {budget} parameters within 1 %"):
        matched_ranks(budget, SMALL, tuple(SMALL), 1)


@pytest.mark.parametrize(
    ("text", "layers", "expected"),
    [
        ("all", 30, range(30)),
        ("late8th", 30, range(26, 30)),
        ("late8th", 32, range(28, 32)),
        ("late4th", 30, range(22, 30)),
        ("early8th", 28, range(4)),
        ("mid8th", 28, range(12, 16)),
        ("last", 12, range(11, 12)),
        (" 22-29 ", 30, range(22, 30)),
        ("5", 30, range(5, 6)),
    ],
)
def test_layers(text, layers, expected):
    assert layer_range(text, layers) == expected


@pytest.mark.parametrize("text", ["late9th", "", "22-", "a-b", "-1", "22-30", "5-4", "1,2"])
def test_layers_that_are_not_there(text):
    with pytest.raises(UserError, match=r"^lora\.layers: ") as caught:
        layer_range(text, 30)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ranks": (("attn/w_q", 0),)}, "lora.rank: got"),
        ({"ranks": ()}, "lora.targets: got"),
        ({"alpha": 0.0}, "lora.alpha: got 0.0"),
        ({"dropout": 1.0}, "lora.dropout: got 1.0"),
    ],
)
def test_bad_values_name_their_field(changes, said):
    with pytest.raises(UserError, match=said):
        Lora(LowRank(**{"ranks": (("attn/w_q", 2),), "alpha": 4.0, "first": 0, "stop": 2} | changes), ())


def test_the_scale_is_alpha_over_the_rank_or_its_root():
    ranks = (("attn/w_q", 4), ("attn/w_k", 9))
    assert [LowRank(ranks, 8.0, 0, 1).scale(kind) for kind, _ in ranks] == [2.0, 8 / 9]
    assert [LowRank(ranks, 8.0, 0, 1, rslora=True).scale(kind) for kind, _ in ranks] == [4.0, 8 / 3]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_targets_have_our_names_and_hugging_faces(name):
    spec = tiny.spec(name)
    if name == "llama":
        assert peft.target_kinds(spec, "all") == tuple(kind for kind, _ in tiny.lora(spec, 1).low_rank.ranks)
        assert peft.target_kinds(spec, "w_down, q_proj,attn/w_v") == ("attn/w_q", "attn/w_v", "mlp/w_down")
        assert peft.target_kinds(spec, "self_attn.o_proj") == ("attn/w_o",)
    else:
        assert peft.target_kinds(spec, "c_attn") == peft.target_kinds(spec, "w_qkv") == ("attn/w_qkv",)
        assert peft.target_kinds(spec, "c_proj") == ("attn/w_o", "mlp/w_down")
        assert peft.target_kinds(spec, "mlp.c_proj") == ("mlp/w_down",)
    for wrong in ("proj", "", "w_x", "lm_head", "w_q" if name == "gpt2" else "w_qkv"):
        with pytest.raises(UserError, match=rf"lora\.targets: '{wrong}' is no linear map of {name}; known: all, w_q"):
            peft.target_kinds(spec, wrong)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rslora", [False, True])
def test_the_merge_adds_each_layers_product(name, rslora):
    spec = tiny.spec(name)
    adapter = tiny.lora(spec, 3, alpha=7.0, rslora=rslora, layers=range(1, 3))
    leaves, backbone = tiny.perturbed(adapter.init(jax.random.key(0))), tiny.backbone(spec)
    merged = trees.flatten(lora.merge(adapter.low_rank, backbone, leaves))
    scale = 7 / (3**0.5 if rslora else 3)
    for path, before in trees.flatten(backbone).items():
        if "/w_" not in path:
            np.testing.assert_array_equal(merged[path], before, err_msg=path)
            continue
        room, leaf = path.split("/")[1:]
        part = leaves[room].get(leaf)
        if part is None:
            third = "qkv".index(leaf[-1])
            part = {"a": leaves[room]["w_qkv"]["a"], "b": leaves[room]["w_qkv"]["b"][:, :, third]}
        expected = np.array(before, np.float64)
        for at, layer in enumerate((1, 2)):
            expected[layer] += scale * np.tensordot(np.float64(part["a"][at]), np.float64(part["b"][at]), 1)
        np.testing.assert_allclose(merged[path], expected, atol=1e-6, err_msg=path)


def test_a_stored_bfloat16_stack_is_merged_as_what_it_holds():
    spec = tiny.spec()
    adapter, backbone = tiny.lora(spec, 2), tiny.backbone(spec, dtype=jnp.bfloat16)
    leaves = tiny.perturbed(adapter.init(jax.random.key(0)))
    stored = backbone | {"layers": jax.tree.map(numerics.stored, backbone["layers"])}
    expected = trees.flatten(lora.merge(adapter.low_rank, backbone, leaves))
    for path, leaf in trees.flatten(lora.merge(adapter.low_rank, stored, leaves)).items():
        assert leaf.dtype == (jnp.uint16 if path.startswith("layers/") else jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(leaf).view(np.uint16), np.asarray(expected[path]).view(np.uint16))
