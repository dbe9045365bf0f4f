"""Counted arithmetic against XLA's cost analysis, against a formula, and the published aim."""

import jax
import jax.numpy as jnp
import optax
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.training import flops
from calyrex_jax.training.step import init_state, make_train_step
from tests import tiny

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}


def wide_model():
    """Two layers, a boundary after each: no scan is longer than one round; wide, so that products outweigh the rest."""
    spec = tiny.spec(hidden_size=256, intermediate_size=512, vocab_size=2048, num_hidden_layers=2)
    return tiny.model(spec, "1,2", mlp_dim=128)


def xla_flops(fn, *args):
    return jax.jit(fn).lower(*args).compile().cost_analysis()["flops"]


def test_count_multiplies_scans_and_takes_the_longest_branch():
    a = jnp.zeros((3, 4))
    product = 2 * 3 * 3 * 4

    def scanned(a):
        return jax.lax.scan(lambda carry, _: (carry, (a @ a.T).sum()), 0.0, None, length=5)[1]

    assert flops.count(scanned, a) == 5 * product
    assert flops.count(jax.jit(scanned), a) == 5 * product
    assert flops.count(lambda a: jax.lax.cond(a[0, 0] > 0, lambda: (a @ a.T).sum(), lambda: 0.0), a) == product
    assert flops.count(jax.checkpoint(lambda a: a @ a.T), a) == product
    with pytest.raises(ValueError, match="unknown length"):
        flops.count(lambda a: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x.T @ x, a), a)


def test_forward_equals_the_formula():
    model = wide_model()
    spec, rows, length, span = model.spec, 2, 64, 16
    d, n, k, h, f = spec.embed_dim, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.mlp_dim
    tokens, slots = rows * length, rows * span
    layer = 2 * tokens * (2 * d * n * h + 2 * d * k * h + 3 * d * f + 2 * length * n * h)
    block = 2 * tokens * (2 * d * n * h + 3 * d * 128 + 2 * span * n * h) + 2 * slots * 2 * d * k * h
    assert flops.forward_flops(model, rows, length, span) == 2 * layer + 2 * block + 2 * tokens * d * spec.vocab_size


@pytest.mark.parametrize(("targets", "cached"), [(None, False), (16, True)])
def test_step_agrees_with_xla(targets, cached):
    model = wide_model()
    optimizer = optax.identity()
    backbone = decoder.abstract_params(model.spec, jnp.float32)
    state = jax.eval_shape(lambda key: init_state(optimizer, model.init_adapters(key)), jax.random.key(0))
    batch = flops.abstract_batch(model, 2, 64, 16, targets, cached)
    measured = xla_flops(make_train_step(model, optimizer), state, backbone, batch)
    counted = flops.step_flops(model, 2, 64, 16, targets, cached)
    assert counted == pytest.approx(measured, rel=0.05)


def test_forward_agrees_with_xla():
    model = wide_model()
    params = {
        "backbone": decoder.abstract_params(model.spec, jnp.float32),
        "adapters": jax.eval_shape(model.init_adapters, jax.random.key(0)),
    }
    measured = xla_flops(model.logits, params, flops.abstract_batch(model, 2, 64, 16))
    assert flops.forward_flops(model, 2, 64, 16) == pytest.approx(measured, rel=0.05)


def test_a_step_of_the_real_model_costs_at_most_one_and_a_half_forward_passes():
    model = tiny.model(DecoderSpec.from_config(SMOLLM2), "late8th", mlp_dim=256)
    sizes = {"rows": 4, "length": 256, "span": 32}
    forward = flops.forward_flops(model, **sizes)
    uncached = flops.step_flops(model, **sizes)
    cached = flops.step_flops(model, **sizes, cached=True)
    on_targets = flops.step_flops(model, **sizes, targets=64, cached=True)
    assert 1.0 < uncached / forward <= 1.5
    assert on_targets < cached < 0.8 * forward
