"""LoRA within the model: what it changes, how it is decoded, dropped, merged and kept out of the frozen part."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calyrex_jax.adapters import lora
from calyrex_jax.backbones import decoder
from calyrex_jax.core import trees
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.training.step import init_state, make_train_step
from tests import tiny

RANKS = {"attn/w_q": 3, "mlp/w_down": 3}


def model(name="llama", layers=None, cal=None, **changes):
    spec = tiny.spec(name)
    adapter = tiny.lora(spec, 2, ranks=RANKS, layers=layers, **changes)
    return Model(spec, (*(tiny.model(spec, cal).adapters if cal else ()), adapter))


def mixed_batch():
    start, middle, none, several = tiny.conversations((9, 14, 5, 12))
    return tiny.packed([[start], [middle], [none, start], [several]], 20, 8)


@pytest.mark.parametrize(
    ("name", "layers", "cal", "dtype"),
    [
        ("llama", None, "1,4", jnp.bfloat16),
        ("llama", range(1, 3), None, jnp.float32),
        ("gpt2", None, None, jnp.float32),
        ("gpt2", None, None, jnp.bfloat16),
    ],
)
def test_at_initialisation_logits_equal_the_backbones_bit_for_bit(name, layers, cal, dtype):
    adapted = model(name, layers, cal)
    params = {"backbone": tiny.backbone(adapted.spec, dtype=dtype), "adapters": adapted.init_adapters(jax.random.key(3))}
    expected = jax.jit(Model(adapted.spec).logits)(params, mixed_batch())
    found = jax.jit(adapted.logits)(params, mixed_batch())
    assert np.asarray(expected).tobytes() == np.asarray(found).tobytes()


@pytest.mark.parametrize(("name", "layers", "cal"), [("gpt2", None, None), ("llama", range(3, 4), "1,3")])
def test_every_leaf_of_a_non_zero_state_matters(name, layers, cal):
    adapted = model(name, layers, cal)
    params, batch, rng = tiny.params(adapted), mixed_batch(), np.random.default_rng(7)
    run = jax.jit(adapted.logits)
    before = run(params, batch)
    leaves = trees.flatten(params["adapters"])
    for path, leaf in leaves.items():
        moved = leaves | {path: leaf + 0.05 * rng.normal(size=leaf.shape).astype(np.float32)}
        change = np.abs(run({**params, "adapters": trees.unflatten(moved)}, batch) - before).max()
        assert np.isfinite(change) and change > 1e-4, path


@pytest.mark.parametrize(
    ("name", "layers", "rslora"), [("llama", range(1, 3), False), ("gpt2", None, True), ("llama", range(3, 4), False)]
)
def test_merged_equals_unmerged(name, layers, rslora):
    adapted = model(name, layers, rslora=rslora)
    params, batch = tiny.params(adapted), mixed_batch()
    [adapter] = adapted.adapters
    merged = lora.merge(adapter.low_rank, params["backbone"], params["adapters"]["lora"])
    frozen = jax.jit(Model(adapted.spec).logits)
    found, plain = (np.asarray(frozen({"backbone": tree, "adapters": {}}, batch)) for tree in (merged, params["backbone"]))
    expected = np.asarray(jax.jit(adapted.logits)(params, batch))
    real = batch.segments > 0
    np.testing.assert_allclose(found[real], expected[real], rtol=0, atol=1e-5 * np.abs(expected[real]).max())
    assert np.abs(plain - expected)[real].max() > 0.1


@pytest.mark.parametrize(
    ("name", "layers", "cal", "unstacked"), [("llama", None, "1,3", False), ("gpt2", range(2, 4), None, True)]
)
def test_cached_generation_equals_uncached(name, layers, cal, unstacked, monkeypatch):
    monkeypatch.setattr(loop, "worth_unstacking", lambda *_: unstacked)
    adapted = model(name, layers, cal)
    tiny.assert_cached_equals_uncached(adapted, tiny.params(adapted), new_tokens=4)


def test_the_frozen_part_ends_where_lora_begins():
    adapted = model(layers=range(2, 4), cal="1,4")
    assert (adapted.first_boundary, adapted.boundaries, adapted.stops) == (1, (1, 4), (1, 2, 4))
    assert model().first_boundary == 0 and model(layers=range(3, 4)).first_boundary == 3
    adapted = model(layers=range(2, 4))
    params, batch = tiny.params(adapted), mixed_batch()
    prefix = jax.jit(adapted.prefix)(params["backbone"], batch)
    whole = jax.jit(adapted.hidden)(params, batch)
    np.testing.assert_allclose(jax.jit(adapted.hidden)(params, batch, prefix), whole, atol=1e-5)
    frozen = jax.jit(adapted.frozen)(params["backbone"], batch, prefix)
    np.testing.assert_allclose(frozen, jax.jit(Model(adapted.spec).hidden)(params, batch), atol=1e-5)


def test_a_run_of_layers_must_not_straddle_what_is_changed():
    adapted = model(layers=range(1, 3))
    params = tiny.params(adapted)
    deltas = adapted.adapters[0].deltas(params["adapters"]["lora"])
    with pytest.raises(ValueError, match="layers 0 to 3 are not all in 1 to 2"):
        decoder.run_layers(adapted.spec, params["backbone"]["layers"], jnp.zeros((1, 2, 32)), None, 0, 4, deltas=deltas)


def test_dropout_follows_seed_step_and_microbatch_and_is_off_elsewhere():
    spec = tiny.spec(num_hidden_layers=2)
    adapted, sure = (Model(spec, (tiny.lora(spec, 2, ranks=RANKS, dropout=rate),)) for rate in (0.5, 0.0))
    params, batch = tiny.params(adapted), mixed_batch()
    batch = batch.replace(targets=batch.segments > 0)
    optimizer = optax.sgd(0.0)
    state = init_state(optimizer, params["adapters"])

    def losses(*steps, **options):
        step = jax.jit(make_train_step(adapted, optimizer, **options))
        return [float(step(state.replace(step=jnp.int32(at)), params["backbone"], batch)[1]["loss"]) for at in steps]

    first, again, later = losses(0, 0, 1)
    assert first == again and len({first, later, *losses(0, 1, seed=1, accumulate=2)}) == 4
    np.testing.assert_array_equal(jax.jit(adapted.logits)(params, batch), jax.jit(sure.logits)(params, batch))


def test_dropout_keeps_the_mean_and_zeroes_its_share():
    adapter = tiny.lora(tiny.spec(), 2, dropout=0.25)
    leaves = tiny.perturbed(adapter.init(jax.random.key(0)))
    one = adapter.deltas(leaves, jax.random.key(5)).at(1)
    x = jnp.ones((64, 16, 32))
    plain = adapter.deltas(leaves).at(1).added("attn/w_v", x)
    found = one.added("attn/w_v", x)
    # 1024 draws of a fixed input: the standard error of the mean is a thirtieth of the spread
    np.testing.assert_allclose(found.mean((0, 1)), plain.mean((0, 1)), atol=0.15 * float(jnp.abs(found - plain).std()) * 2)
    assert float(jnp.abs(found - plain).max()) > 0.1
    assert adapter.deltas(leaves).at(1).added("mlp/w_none", x) is None
