"""ITI: a shift of heads' outputs is a bias behind the output projection; probes find the head that carries the label."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.iti import Iti
from calyrex_jax.backbones import decoder
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import attend, take_layer
from calyrex_jax.generate import loop
from calyrex_jax.model import Model
from calyrex_jax.training import iti
from tests import tiny

SPEC = tiny.spec()
BATCH = tiny.packed([[c] for c in tiny.conversations()], 16)


def shifted(strength=2.0):
    return Model(SPEC, (Iti(range(SPEC.num_layers), SPEC.embed_dim, strength),))


def biased(params, strength):
    """The same backbone with the shifts as biases that its architecture then has."""
    layers = params["backbone"]["layers"]
    shift = strength * params["adapters"]["iti"]["shift"]
    layers = layers | {"attn": layers["attn"] | {"b_o": shift}}
    return Model(replace(SPEC, out_bias=True)), {"backbone": params["backbone"] | {"layers": layers}, "adapters": {}}


def test_a_shift_is_a_bias_of_the_output_projection():
    model = shifted()
    params = tiny.params(model)
    other, theirs = biased(params, 2.0)
    np.testing.assert_allclose(
        jax.jit(model.logits)(params, BATCH), jax.jit(other.logits)(theirs, BATCH), rtol=1e-5, atol=1e-5
    )
    options = {"max_new_tokens": 5, "stop_ids": [], "pad_id": 0}
    found = loop.generate(model, params, tiny.conversations(), **options)
    assert [r.tokens for r in found] == [r.tokens for r in loop.generate(other, theirs, tiny.conversations(), **options)]


def test_strength_0_and_a_fresh_shift_are_the_identity():
    plain = Model(SPEC)
    params = tiny.params(shifted())
    wanted = jax.jit(plain.logits)(params, BATCH)
    np.testing.assert_array_equal(jax.jit(shifted(0.0).logits)(params, BATCH), wanted)
    fresh = params | {"adapters": shifted().init_adapters(jax.random.key(0))}
    np.testing.assert_array_equal(jax.jit(shifted().logits)(fresh, BATCH), wanted)
    for layer in range(SPEC.num_layers):
        moved = trees.flatten(fresh["adapters"])["iti/shift"].at[layer, 3].set(0.5)
        changed = jax.jit(shifted().logits)(params | {"adapters": {"iti": {"shift": moved}}}, BATCH)
        assert float(jnp.abs(changed - wanted).max()) > 1e-3


def test_negative_strength_is_refused():
    with pytest.raises(UserError, match=r"config\.iti\.strength: got -1"):
        shifted(-1)


def test_head_outputs_are_what_the_projection_is_given():
    """Against each conversation alone, layer by layer, with the mask written out."""
    backbone = tiny.backbone(SPEC)
    index = np.array([len(c.tokens) - 1 for c in tiny.conversations()])
    found = jax.jit(lambda b, batch: iti.head_outputs(SPEC, b, batch, index))(backbone, BATCH)
    assert found.shape == (SPEC.num_layers, 4, SPEC.num_heads, SPEC.head_dim)
    for row, conversation in enumerate(tiny.conversations()):
        length = len(conversation.tokens)
        positions = np.arange(length)[None]
        context = decoder.make_context(SPEC, positions, np.ones_like(positions))
        x = decoder.embed(SPEC, backbone, conversation.tokens[None], positions)

        def causal(q, k, v):
            out = attend(q, k, v, np.tri(q.shape[1], dtype=bool)[None])
            return out, out

        for layer in range(SPEC.num_layers):
            leaves = jax.tree.map(functools.partial(take_layer, layer=layer), backbone["layers"])
            x, out = decoder.DecoderLayer(SPEC).apply({"params": leaves}, x, context, layer, causal)
            np.testing.assert_allclose(found[layer, row], out[0, -1], rtol=1e-4, atol=1e-4)


def test_the_head_that_carries_the_label_is_found():
    rng = np.random.default_rng(0)
    labels, other = rng.integers(0, 2, 80), rng.integers(0, 2, 60)
    heads = rng.normal(size=(SPEC.num_layers, 80, SPEC.num_heads, SPEC.head_dim)).astype(np.float32)
    validation = rng.normal(size=(SPEC.num_layers, 60, SPEC.num_heads, SPEC.head_dim)).astype(np.float32)
    planted = np.zeros(SPEC.head_dim, np.float32)
    planted[2] = 3.0
    heads[2, :, 1] += np.where(labels, 1, -1)[:, None] * planted
    validation[2, :, 1] += np.where(other, 1, -1)[:, None] * planted
    backbone = tiny.backbone(SPEC)
    shift, [best] = iti.fit(SPEC, backbone, heads, labels, validation, other, count=1)
    assert (best.layer, best.head) == (2, 1) and best.accuracy > 0.95
    assert not shift[[0, 1, 3]].any()
    w_o = np.asarray(backbone["layers"]["attn"]["w_o"])[2, 1]
    towards_safe = -planted / 3.0 @ w_o
    cosine = shift[2] @ towards_safe / np.linalg.norm(shift[2]) / np.linalg.norm(towards_safe)
    assert cosine > 0.95
    with pytest.raises(UserError, match=r"config\.iti\.heads is 17; this backbone has 16 heads"):
        iti.fit(SPEC, backbone, heads, labels, validation, other, count=17)
