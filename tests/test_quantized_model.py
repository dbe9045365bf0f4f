"""A quantised backbone in all that is done with one: the same arithmetic as its decoded self, identity at initialisation,
gradients of the adapters alone, cached decoding, and a whole run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import build, train
from calyrex_jax.adapters.lora import merge
from calyrex_jax.core import quantized, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.training.optimizer import OptimizerConfig, make_optimizer
from calyrex_jax.training.step import init_state, make_train_step
from tests import tiny, tiny_runs
from tests.training.test_step import batch


def encoded(backbone, kind):
    """A backbone with every leaf quantised that `kind` quantises, and the same with these leaves decoded again."""
    quant, plain = {}, {}
    for path, leaf in trees.flatten(backbone).items():
        if not (own := quantized.kind_of(path, kind)):
            quant[path] = plain[path] = leaf
            continue
        axes, layered = quantized.input_axes(path), path.startswith("layers/")
        layers = [quantized.encode(np.asarray(w), axes, own) for w in (leaf if layered else [leaf])]
        for name in layers[0]:
            quant[f"{path}/{name}"] = jnp.asarray(np.stack([x[name] for x in layers]) if layered else layers[0][name])
        back = [quantized.decoded(jax.tree.map(jnp.asarray, parts), leaf.dtype) for parts in layers]
        plain[path] = jnp.stack(back) if layered else back[0]
    return trees.unflatten(quant), trees.unflatten(plain)


def cal_model(name="llama"):
    return tiny.model(tiny.spec(name), "3,4")


@pytest.mark.parametrize(("name", "kind"), [("llama", "int8"), ("mistral", "nf4"), ("gpt2", "int4")])
def test_logits_are_those_of_the_decoded_weights(name, kind):
    model = cal_model(name)
    params = tiny.params(model)
    quant, plain = encoded(params["backbone"], kind)
    assert trees.count(quant) == trees.count(plain)
    made = batch()
    run = jax.jit(model.logits)
    want = run(params | {"backbone": plain}, made)
    np.testing.assert_allclose(run(params | {"backbone": quant}, made), want, rtol=1e-4, atol=1e-4)
    assert np.abs(run(params, made) - want).max() > 1e-3  # the bits that were taken away are felt


@pytest.mark.parametrize(("kind", "dtype"), [("int8", jnp.float32), ("int4", jnp.bfloat16)])
def test_at_initialisation_adapted_equals_frozen_bit_for_bit(kind, dtype):
    model = cal_model()
    backbone = encoded(jax.tree.map(np.asarray, tiny.backbone(model.spec)), kind)[0]
    backbone = trees.map_with_path(
        lambda path, leaf: leaf.astype(dtype) if leaf.dtype == np.float32 and not path.endswith("/scale") else leaf, backbone
    )
    for norm in (backbone["final_norm"], backbone["layers"]["attn_norm"], backbone["layers"]["mlp_norm"]):
        norm["scale"] = norm["scale"].astype(dtype)
    params = {"backbone": backbone, "adapters": model.init_adapters(jax.random.key(0))}
    adapted = jax.jit(model.logits)(params, batch())
    np.testing.assert_array_equal(adapted, jax.jit(Model(model.spec).logits)(params, batch()))


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_step_trains_the_adapters_as_on_decoded_weights(kind):
    model = cal_model()
    params = tiny.params(model)
    quant, plain = encoded(params["backbone"], kind)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, steps=10, schedule="constant"), params["adapters"])
    before = trees.checksum(quant)
    found = []
    for backbone in (quant, plain):
        step = jax.jit(make_train_step(model, optimizer))
        state, measured = step(init_state(optimizer, params["adapters"]), backbone, batch())
        found.append((state.trainable, measured))
    assert trees.checksum(quant) == before
    np.testing.assert_allclose(found[0][1]["loss"], found[1][1]["loss"], rtol=1e-5)
    np.testing.assert_allclose(found[0][1]["grad_norm"], found[1][1]["grad_norm"], rtol=1e-4)
    for path, leaf in trees.flatten(found[0][0]).items():
        assert leaf.dtype == jnp.float32
        assert not np.array_equal(leaf, trees.flatten(params["adapters"])[path]), path


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_cached_generation_equals_uncached(kind):
    model = cal_model()
    params = tiny.params(model)
    params["backbone"] = encoded(params["backbone"], kind)[0]
    tiny.assert_cached_equals_uncached(model, params, new_tokens=5)
    assert not loop.worth_unstacking(params["backbone"]["layers"], 10**9, 1)  # it would be decoded for good


def test_lora_is_not_merged_into_fewer_bits():
    spec = tiny.spec()
    lora = tiny.lora(spec, 2)
    leaves = lora.init(jax.random.key(0))
    with pytest.raises(UserError, match=r"backbone\.quantize: LoRA cannot be merged"):
        merge(lora.low_rank, encoded(tiny.backbone(spec), "int8")[0], leaves)


def test_lora_works_beside_quantised_maps():
    spec = tiny.spec()
    model = Model(spec, (tiny.lora(spec, 2),))
    params = tiny.params(model)
    quant, plain = encoded(params["backbone"], "int4")
    run = jax.jit(model.logits)
    made = batch()
    np.testing.assert_allclose(
        run(params | {"backbone": quant}, made), run(params | {"backbone": plain}, made), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "adapter"), [("int8", "cal+lora"), ("nf4", "cal")])
def test_a_run_on_a_quantised_backbone(kind, adapter, tmp_path, own_signals):
    place = tiny_runs.furnish(tmp_path)
    config = tiny_runs.make_config(place / "model", place / "chats.jsonl", adapter__name=adapter, train__steps=8)
    config.backbone.quantize, config.cal.init, config.data.prefix_cache = kind, "layer", "float32"
    assert train.train(config, str(tmp_path / "run")) == 0
    report, plain = tiny_runs.report(tmp_path / "run"), build.open_run(config)
    assert report["backbone_unchanged"] is True
    assert report["parameters"]["frozen"] == trees.count(build.decoder.abstract_params(plain.spec, jnp.float32))
    losses = tiny_runs.losses(tmp_path / "run")
    assert losses[-1] < losses[0]
    # what was trained beside other bits is not taken for this backbone's
    config.backbone.quantize = ""
    with pytest.raises(UserError, match=r"backbone\.quantize"):
        build.trained_adapters(build.open_run(config), tmp_path / "run")
