import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.cal import Cal, CalConfig, default_mlp_dim
from calyrex_jax.adapters.placement import boundaries
from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.named import named_spec
from calyrex_jax.core import trees
from calyrex_jax.core.types import Batch
from calyrex_jax.model import Model
from tests import tiny


def test_boundaries_of_a_model():
    assert (tiny.model(tiny.spec()).first_boundary, tiny.model(tiny.spec()).boundaries) == (4, ())
    model = tiny.model(tiny.spec(), "3,1")
    assert (model.first_boundary, model.boundaries) == (1, (1, 3))
    assert tiny.model(tiny.spec(), "early8th").first_boundary == 0


@pytest.mark.parametrize("placement", [None, "late8th", "early8th", "4"])
def test_hidden_from_the_prefix_equals_hidden(placement):
    model = tiny.model(tiny.spec(), placement)
    params, batch = tiny.params(model), tiny.packed([tiny.conversations((9, 6)), tiny.conversations((8,), 1)], 16)
    whole = jax.jit(model.hidden)(params, batch)
    prefix = jax.jit(model.prefix)(params["backbone"], batch)
    assert prefix.shape == (2, 16, 32)
    chex.assert_trees_all_close(jax.jit(model.hidden)(params, batch, prefix), whole, atol=1e-5)


def test_the_prefix_at_boundary_zero_is_the_embedding():
    model = tiny.model(tiny.spec(), "0,2")
    params, batch = tiny.params(model), tiny.packed([tiny.conversations((9,))], 16)
    chex.assert_trees_all_equal(model.prefix(params["backbone"], batch), params["backbone"]["embed"]["tokens"][batch.tokens])


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "dynamic"])
def test_packed_conversations_do_not_see_each_other(family):
    model = tiny.model(tiny.spec(family), "1,4")
    params, talks = tiny.params(model), tiny.conversations((9, 14, 5, 12))
    run = jax.jit(model.logits)
    together = np.asarray(run(params, tiny.packed([talks], 48, width=12)))[0]
    at = 0
    for talk in talks:
        alone = np.asarray(run(params, tiny.packed([[talk]], 48, width=12)))[0, : len(talk.tokens)]
        found = together[at : at + len(talk.tokens)]
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-4 * np.abs(alone).max())
        at += len(talk.tokens)


def test_adapters_at_one_boundary_apply_in_their_given_order():
    spec = tiny.spec()
    one, two = (Cal(tiny.cal_config(spec), (3,), name) for name in ("one", "two"))
    leaves = {"one": tiny.perturbed(one.init(jax.random.key(0)), 1), "two": tiny.perturbed(two.init(jax.random.key(1)), 2)}
    params = {"backbone": tiny.backbone(spec), "adapters": leaves}
    batch = tiny.packed([tiny.conversations((9, 6))], 16)
    forward, backward = (jax.jit(Model(spec, order).logits)(params, batch) for order in ((one, two), (two, one)))
    assert np.abs(np.asarray(forward - backward)).max() > 1e-2
    assert set(Model(spec, (one, two)).init_adapters(jax.random.key(0))) == {"one", "two"}


def test_a_conversation_with_a_span_is_changed_only_from_the_span_on():
    spec = tiny.spec()
    model = tiny.model(spec, "1,3")
    params, talk = tiny.params(model), tiny.conversations((9, 14))[1]
    batch = tiny.packed([[talk]], 16)
    change = np.abs(np.asarray(jax.jit(model.logits)(params, batch) - jax.jit(tiny.model(spec).logits)(params, batch)))[
        0
    ].max(-1)
    first = int(np.flatnonzero(talk.system)[0])
    assert change[:first].max() == 0 and change[first : len(talk.tokens)].min() > 1e-3


@pytest.mark.parametrize(("name", "blocks"), [("Llama-3.1-8B", 5), ("Qwen2.5-1.5B", 5)])
def test_published_sizes_by_shape_alone(name, blocks):
    spec = named_spec(name)
    shape = (
        spec.embed_dim,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        default_mlp_dim(spec.embed_dim),
        spec.norm_eps,
    )
    cal = Cal(CalConfig(*shape), boundaries("late8th", spec.num_layers))
    model = Model(spec, (cal,))
    adapters = jax.eval_shape(model.init_adapters, jax.random.key(0))
    d, n, k, h, f = shape[:5]
    assert trees.count(adapters) == blocks * (2 * d * n * h + 2 * d * k * h + 3 * d * f + 2 * d)
    whole = jax.ShapeDtypeStruct((2, 48), jnp.int32)
    flags = jax.ShapeDtypeStruct((2, 48), jnp.bool_)
    batch = Batch(whole, whole, whole, flags, flags, jax.ShapeDtypeStruct((2, 16), jnp.int32))
    params = {"backbone": decoder.abstract_params(spec, jnp.bfloat16), "adapters": adapters}
    logits = jax.eval_shape(model.logits, params, batch)
    assert (logits.shape, logits.dtype) == ((2, 48, spec.vocab_size), jnp.float32)
    assert jax.eval_shape(model.hidden, params, batch).dtype == jnp.bfloat16
