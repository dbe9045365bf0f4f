"""Every leaf of every family matches one rule and every rule some leaf; what does not divide is refused or replicated."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from calyrex_jax.adapters.iti import Iti
from calyrex_jax.adapters.re_control import ReControl
from calyrex_jax.backbones import decoder
from calyrex_jax.core import quantized, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.model import Model
from calyrex_jax.sharding import rules
from calyrex_jax.sharding.mesh import make_mesh
from tests import tiny

BIASED = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}


def mesh_of(data=1, fsdp=1, tensor=1):
    """What the rules read of a mesh, of more devices than there are."""
    return SimpleNamespace(shape={"data": data, "fsdp": fsdp, "tensor": tensor})


def leaves_of(name, **changes):
    return decoder.abstract_params(tiny.spec(name, **changes), jnp.float32)


def adapter_leaves():
    spec = tiny.spec()
    model = Model(
        spec, (*tiny.model(spec, "every", copy=True).adapters, tiny.parallel_mlp(spec, "every"), tiny.lora(spec, 3))
    )
    return jax.eval_shape(model.init_adapters, jax.random.key(0))


def gpt2_adapter_leaves():
    return {"lora": jax.eval_shape(tiny.lora(tiny.spec("gpt2"), 3).init, jax.random.key(0))}


def svgt_leaves(**changes):
    return {"svgt": jax.eval_shape(tiny.svgt(tiny.spec(), **changes).init, jax.random.key(0))}


def steering_leaves():
    spec = tiny.spec()
    fitted = Iti(range(spec.num_layers), spec.embed_dim, 1.0), ReControl((2,), spec.embed_dim, 8, 1, 0.1)
    return jax.eval_shape(Model(spec, fitted).init_adapters, jax.random.key(0))


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "biased"])
def test_every_backbone_leaf_has_one_rule(name):
    tree = leaves_of("llama", **BIASED) if name == "biased" else leaves_of(name)
    for path, leaf in trees.flatten(tree).items():
        found = [spec for pattern, spec in rules.BACKBONE_RULES if re.fullmatch(pattern, path)]
        assert len(found) == 1, path
        assert len(found[0]) in (0, leaf.ndim), path


def test_every_rule_has_a_leaf():
    paths = {path for tree in (leaves_of("llama", **BIASED), leaves_of("gpt2")) for path in trees.flatten(tree)}
    for pattern, _ in rules.BACKBONE_RULES:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern
    made = adapter_leaves(), gpt2_adapter_leaves(), svgt_leaves(), steering_leaves()
    made += (svgt_leaves(pooling="attention", aggregate="blocks"), svgt_leaves(strength=1.0))
    paths = {path for tree in made for path in trees.flatten(tree)}
    for pattern, _ in rules.ADAPTER_RULES:
        assert any(re.fullmatch(pattern, path) for path in paths), pattern


def test_matrices_are_sharded_both_ways_and_never_over_layers():
    tree = leaves_of("llama", **BIASED, vocab_size=96)
    specs = trees.flatten(rules.specs(tree, rules.BACKBONE_RULES, mesh_of(fsdp=2, tensor=2)))
    assert specs["layers/attn/w_q"] == P(None, "fsdp", "tensor", None)
    assert specs["layers/attn/w_o"] == P(None, "tensor", None, "fsdp")
    assert specs["layers/mlp/w_down"] == P(None, "tensor", "fsdp")
    assert specs["embed/tokens"] == specs["head/w"] == P(("tensor", "fsdp"), None)
    odd = trees.flatten(rules.specs(leaves_of("llama", vocab_size=98), rules.BACKBONE_RULES, mesh_of(fsdp=4, tensor=2)))
    assert odd["embed/tokens"] == P("tensor", "fsdp")  # 98 rows divide over two devices, not over eight
    for path, spec in specs.items():
        assert not path.startswith("layers/") or not len(spec) or spec[0] is None, path
    cal = trees.flatten(rules.specs(adapter_leaves(), rules.ADAPTER_RULES, mesh_of(fsdp=2, tensor=2)))
    assert cal["cal/boundary_1/w_up"] == P("fsdp", "tensor")
    assert cal["cal/boundary_1/attn_norm"] == P()
    assert cal["parallel_mlp/boundary_1/w_down"] == P("tensor", "fsdp")
    # LoRA's matrices lie as the backbone's; its rank and the layer axis are whole
    assert cal["lora/attn/w_q/a"] == P(None, "fsdp", None) and cal["lora/attn/w_q/b"] == P(None, None, "tensor", None)
    assert cal["lora/mlp/w_down/a"] == P(None, "tensor", None) and cal["lora/mlp/w_down/b"] == P(None, None, "fsdp")
    gpt2 = trees.flatten(rules.specs(gpt2_adapter_leaves(), rules.ADAPTER_RULES, mesh_of(fsdp=2, tensor=2)))
    assert gpt2["lora/attn/w_qkv/b"] == P(None, None, None, "tensor", None)
    svgt = trees.flatten(rules.specs(svgt_leaves(), rules.ADAPTER_RULES, mesh_of(fsdp=2, tensor=2)))
    assert svgt["svgt/bridge/attn/query/kernel"] == P("fsdp", None, None) and svgt["svgt/bridge/seeds"] == P()


def test_fewer_key_value_heads_than_shards_are_replicated():
    tree = leaves_of("llama", **BIASED, vocab_size=96)  # 4 query heads, 2 key/value heads
    specs = trees.flatten(rules.specs(tree, rules.BACKBONE_RULES, mesh_of(tensor=4)))
    for name in "kv":
        assert specs[f"layers/attn/w_{name}"] == P(None, "fsdp", None, None)
        assert specs[f"layers/attn/b_{name}"] == P(None, None, None)
    assert specs["layers/attn/w_q"] == P(None, "fsdp", "tensor", None)
    low = trees.flatten(rules.specs({"lora": adapter_leaves()["lora"]}, rules.ADAPTER_RULES, mesh_of(tensor=4)))
    assert low["lora/attn/w_k/b"] == P(None, None, None, None)


def test_a_dimension_that_does_not_divide_is_refused_by_name():
    with pytest.raises(UserError, match=r"mesh\.tensor=2: dimension 0 of embed/tokens, 97, does not divide"):
        rules.specs(leaves_of("llama"), rules.BACKBONE_RULES, mesh_of(tensor=2))
    with pytest.raises(UserError, match=r"mesh\.fsdp=3: dimension .* 32, does not divide"):
        rules.specs(leaves_of("llama"), rules.BACKBONE_RULES, mesh_of(fsdp=3))


def test_quantised_leaves_lie_as_the_leaf_would():
    tree = leaves_of("llama", **BIASED, vocab_size=96)
    for kind in ("int8", "int4"):
        specs = trees.flatten(rules.specs(quantized.abstract(tree, kind), rules.BACKBONE_RULES, mesh_of(fsdp=2, tensor=2)))
        assert specs["layers/attn/w_q/q"] == P(None, "fsdp", "tensor", None)
        # one factor for all inputs, or for 32 of them: nothing to cut along these
        assert specs["layers/attn/w_q/scale"] == P(None, None, "tensor", None)
        assert specs["layers/attn_norm/scale"] == P()
    assert specs["head/w/q"] == specs["head/w/scale"] == P(("tensor", "fsdp"), None)


def test_an_unknown_leaf_is_an_error():
    with pytest.raises(ValueError, match="leaf cal/boundary_1/w_new matches 0 rules"):
        rules.specs({"cal": {"boundary_1": {"w_new": np.zeros((2, 2))}}}, rules.ADAPTER_RULES, mesh_of())


def test_shardings_place_arrays():
    mesh = make_mesh()
    tree = {"cal": {"boundary_1": {"w_up": jnp.ones((4, 6))}}}
    placed = jax.device_put(tree, rules.shardings(tree, rules.ADAPTER_RULES, mesh))
    np.testing.assert_array_equal(placed["cal"]["boundary_1"]["w_up"], np.ones((4, 6)))
    assert rules.batch_sharding(mesh).spec == P(("data", "fsdp"))
    assert rules.replicated(mesh).spec == P()


def test_the_mesh_takes_what_there_is():
    assert dict(make_mesh().shape) == {"data": 1, "fsdp": 1, "tensor": 1}
    assert dict(make_mesh(1, -1, 1).shape) == {"data": 1, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ((0, 1, 1), "mesh.data must be at least 1, or -1"),
        ((-1, -1, 1), "only one axis can be -1"),
        ((-1, 3, 1), "3 does not divide 8 devices"),
        ((2, 2, 1), "makes 4 devices, but there are 8"),
        ((1, 1, -2), "mesh.tensor must be at least 1, or -1"),
    ],
)
def test_a_mesh_that_does_not_fit(sizes, said):
    with pytest.raises(UserError) as caught:
        make_mesh(*sizes, devices=jax.devices() * 8)
    assert said in str(caught.value)
