"""Guided decoding: cached steps against whole sequences, and these against a plain loop; triggers, schedules, harm."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import guidance
from calyrex_jax.backbones import decoder
from calyrex_jax.core.numerics import attend, take_layer
from calyrex_jax.generate import loop
from calyrex_jax.generate.batching import assemble
from calyrex_jax.generate.sampling import Sampling
from calyrex_jax.model import Model
from tests import tiny

NEW = 7


def guided_model(name="llama", placement=None, every=2, **changes):
    spec = tiny.spec(name)
    adapters = () if placement is None else tiny.model(spec, placement).adapters
    return Model(spec, adapters, tiny.svgt(spec, refresh_every=every, **changes))


def harmful(params):
    """The same parameters, with a discriminator that calls everything harmful, so that the correction is at work."""
    final = params["adapters"]["svgt"]["value_space"]["discriminator"]["out"]
    final["bias"] = final["bias"] + 3.0
    return params


def prompts():
    rng = np.random.default_rng(5)
    made = []
    for size, span in ((9, 4), (5, 0), (12, 6)):
        made.append(tiny.Conversation(rng.integers(0, tiny.VOCAB, size).astype(np.int32), np.arange(size) < span))
    return made


def dialogue(chosen, replies):
    """Prompts as generation pads them, and given replies."""
    batch = assemble(chosen, len(chosen), 0, left_pad=True)
    width = max(map(len, replies))
    tokens, mask = np.zeros((len(chosen), width), np.int32), np.zeros((len(chosen), width), bool)
    for row, reply in enumerate(replies):
        tokens[row, : len(reply)], mask[row, : len(reply)] = reply, True
    return guidance.Dialogue(batch.tokens, batch.segments > 0, tokens, mask, batch.span)


def stepwise(model, params, chosen, replies):
    """Logits [B, T, V] before each token of the given replies, and harm, by prefill and decode."""
    batch = assemble(chosen, len(chosen), 0, left_pad=True)
    replies = np.asarray(replies)
    new = replies.shape[1]
    prefill, decode = jax.jit(model.prefill, static_argnums=(2, 3)), jax.jit(model.decode, static_argnums=3)
    x, state = prefill(params, batch, batch.tokens.shape[1] + model.bridge_slots + new, new)
    found = [x]
    for step in range(1, new):
        x, state = decode(params, replies[:, step - 1], state, step % model.svgt.refresh_every == 0)
        found.append(x)
    return decoder.logits(model.spec, params["backbone"], jnp.stack(found, 1)), state.guide.harm


def close(found, wanted, tolerance=1e-4):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=tolerance * float(np.abs(wanted).max()))


CASES = {
    "llama": ("llama", None, 2, {}),
    "llama, every token": ("llama", None, 1, {}),
    "llama, blocks and attention": ("llama", None, 3, {"pooling": "attention", "aggregate": "blocks"}),
    "not causal": ("llama", None, 3, {"causal": False}),
    "gpt2": ("gpt2", None, 3, {}),
    "mistral, a window of 5": ("mistral", None, 2, {}),
    "dynamic rotary base": ("dynamic", None, 2, {}),
    "CAL below and above": ("llama", "1,2,3", 2, {}),
    "injection": ("llama", "1,2,3", 2, {"strength": 2.0}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_cached_equals_one_pass_over_the_whole_dialogue(case):
    name, placement, every, changes = CASES[case]
    model = guided_model(name, placement, every, **changes)
    params = harmful(tiny.params(model))
    rng = np.random.default_rng(3)
    replies = rng.integers(0, tiny.VOCAB, (3, NEW)).astype(np.int32)
    logits, harm = stepwise(model, params, prompts(), replies)
    if not model.svgt.value.causal:
        # the whole reply gives one score: one pass knows no earlier ones, so only the first trigger can be compared
        _, judged = jax.jit(model.judged)(params, dialogue(prompts(), replies[:, :0]))
        close(harm[:, 0], jax.nn.sigmoid(judged.score[:, -1]))
        return
    final, judged = jax.jit(model.guided)(params, dialogue(prompts(), replies))
    close(decoder.logits(model.spec, params["backbone"], final), logits)
    triggers = guidance.schedule(model.svgt, NEW)
    close(jax.nn.sigmoid(judged.score[:, triggers]), harm, 1e-5)
    assert harm.shape[1] == len(triggers) == 1 + (NEW - 1) // every
    assert float(jnp.abs(harm[:, 1:] - harm[:, :1]).mean()) > 1e-3  # the trigger is the newest token


def by_hand(model, params, prompt, reply):
    """Logits before each token of one reply: every slot of the layers above l*, with its own list of what it may see."""
    spec, svgt, tree = model.spec, model.svgt, params["adapters"]["svgt"]
    layers, width = params["backbone"]["layers"], svgt.bridge_config.num_tokens
    m, tokens = len(prompt), np.concatenate([prompt, reply])
    positions = np.array([t if t < m else t + width for t in range(len(tokens))])

    def run(x, positions, allowed, start, stop):
        context = decoder.make_context(spec, positions[None], np.ones_like(positions)[None])
        mask = np.asarray(allowed)[None]
        for layer in range(start, stop):
            leaves = jax.tree.map(functools.partial(take_layer, layer=layer), layers)
            x, _ = decoder.DecoderLayer(spec).apply(
                {"params": leaves}, x, context, layer, lambda q, k, v: (attend(q, k, v, mask), None)
            )
        return x

    x = decoder.embed(spec, params["backbone"], tokens[None], positions[None])
    x = run(x, positions, np.tri(len(tokens), dtype=bool), 0, svgt.boundary)
    space, leaves = svgt.value_space, tree["value_space"]
    bridge, slots = None, [("prompt", t) for t in range(m)]
    inputs, places, seen = [x[0, t] for t in range(m)], list(range(m)), [set(range(t + 1)) for t in range(m)]
    read, ordinary, current = [], list(range(m)), []
    for n in range(len(reply)):  # token n of the reply was just read; 0 is the last prompt position
        newest = m - 1 + n
        if n % svgt.refresh_every == 0:
            z = space.values(leaves, x[:, m - 1 : newest + 1], np.ones((1, n + 1), bool), x[:, :m], np.ones((1, m), bool))[
                :, -1
            ]
            proposal = svgt.bridge.propose(tree["bridge"], x[:, newest], space.correction(leaves, z))[0]
            bridge = proposal if bridge is None else svgt.momentum * bridge + (1 - svgt.momentum) * proposal
            current = []
            for k in range(width):
                current.append(len(slots))
                seen.append(set(range(m)) | set(current))
                slots.append(("bridge", k))
                inputs.append(bridge[k])
                places.append(m + k)
        if n:
            ordinary.append(len(slots))
            seen.append(set(ordinary) | set(current))
            slots.append(("reply", n))
            inputs.append(x[0, newest])
            places.append(positions[newest])
        read.append(len(slots) - 1)
    allowed = np.zeros((len(slots), len(slots)), bool)
    for row, visible in enumerate(seen):
        allowed[row, sorted(visible)] = True
    top = run(jnp.stack(inputs)[None], np.asarray(places), allowed, svgt.boundary, spec.num_layers)
    return decoder.logits(spec, params["backbone"], decoder.final_norm(spec, params["backbone"], top[0, np.array(read)]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_one_pass_equals_a_loop_over_slots(name):
    model = guided_model(name, every=3)
    params = harmful(tiny.params(model))
    prompt, reply = prompts()[0].tokens, np.random.default_rng(2).integers(0, tiny.VOCAB, NEW).astype(np.int32)
    final, _ = jax.jit(model.guided)(params, dialogue(prompts()[:1], [reply]))
    close(decoder.logits(model.spec, params["backbone"], final[0]), by_hand(model, params, prompt, reply))


@pytest.mark.slow
def test_replies_are_those_of_the_whole_pass_and_alike_in_any_batch():
    model = guided_model(every=2)
    params = harmful(tiny.params(model))
    options = {"max_new_tokens": NEW, "stop_ids": [3], "pad_id": 0}
    together = loop.generate(model, params, prompts(), batch_size=3, **options)
    for row, reply in enumerate(together):
        assert len(reply.harm) == 1 + max(len(reply.tokens) - 1, 0) // 2
        final, judged = model.guided(params, dialogue(prompts()[row : row + 1], [reply.tokens]))
        logits = np.asarray(decoder.logits(model.spec, params["backbone"], final[0]))
        chosen = np.take_along_axis(logits, np.asarray(reply.tokens)[:, None], 1)[:, 0]
        assert (logits.max(-1) - chosen <= 1e-4 * np.abs(logits).max()).all()
        close(jax.nn.sigmoid(judged.score[0, guidance.schedule(model.svgt, len(reply.tokens))]), np.asarray(reply.harm))
        [alone] = loop.generate(model, params, prompts()[row : row + 1], batch_size=1, **options)
        assert alone.tokens == reply.tokens
        close(np.asarray(alone.harm), np.asarray(reply.harm), 1e-5)
    drawn = [
        loop.generate(model, params, prompts(), batch_size=size, sampling=Sampling(temperature=1.0, seed=4), **options)
        for size in (3, 1)
    ]
    assert [r.tokens for r in drawn[0]] == [r.tokens for r in drawn[1]]
    assert [r.tokens for r in drawn[0]] != [r.tokens for r in together]


@pytest.mark.slow
def test_a_long_period_is_a_fixed_bridge():
    model = guided_model(every=50)
    params = harmful(tiny.params(model))
    replies = np.random.default_rng(3).integers(0, tiny.VOCAB, (3, NEW)).astype(np.int32)
    logits, harm = stepwise(model, params, prompts(), replies)
    assert harm.shape == (3, 1)
    talk = dialogue(prompts(), replies)
    x, judged = jax.jit(model.judged)(params, talk)
    fixed = guidance.proposals(model.svgt, params["adapters"]["svgt"]["bridge"], judged, jnp.zeros((3, 1), jnp.int32))
    _, final = model.above(params, talk, x, fixed, (0,))
    close(decoder.logits(model.spec, params["backbone"], final), logits)
    other = replace(model, svgt=replace(model.svgt, refresh_every=2))
    moved, _ = stepwise(other, params, prompts(), replies)
    close(moved[:, :2], logits[:, :2])
    assert float(jnp.abs(moved[:, 2:] - logits[:, 2:]).max()) > 1e-2


def test_an_injection_of_strength_0_is_the_identity():
    replies = np.random.default_rng(3).integers(0, tiny.VOCAB, (3, NEW)).astype(np.int32)
    model, strong = guided_model(strength=0.0), guided_model(strength=1.0)
    params = harmful(tiny.params(model))
    found, harm = stepwise(model, params, prompts(), replies)
    plain = Model(model.spec)
    decode = jax.jit(plain.decode)
    batch = assemble(prompts(), 3, 0, left_pad=True)
    x, state = jax.jit(plain.prefill, static_argnums=(2, 3))(params, batch, batch.tokens.shape[1] + NEW, NEW)
    wanted = [x]
    for step in range(1, NEW):
        x, state = decode(params, replies[:, step - 1], state)
        wanted.append(x)
    np.testing.assert_array_equal(found, decoder.logits(model.spec, params["backbone"], jnp.stack(wanted, 1)))
    assert harm.shape == (3, 4) and float(jnp.abs(stepwise(strong, params, prompts(), replies)[0] - found).max()) > 0.1


def test_bridges_are_averaged_over_refreshes():
    made = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 1, 4)), jnp.float32)
    found = guidance.averaged(tiny.svgt(tiny.spec()), made)
    first = made[:, 0]
    second = 0.5 * (first + made[:, 1])
    np.testing.assert_allclose(found, jnp.stack([first, second, 0.5 * (second + made[:, 2])], 1), rtol=1e-6)


def test_without_svgt_nothing_is_guided():
    plain, guided = Model(tiny.spec()), guided_model()
    assert plain.bridge_slots == 0 and guided.bridge_slots == 3
    assert guided.first_boundary == 2 and guided_model(placement="1").first_boundary == 1
    params = tiny.params(guided)
    frozen = {"backbone": params["backbone"], "adapters": {}}
    options = {"max_new_tokens": 4, "stop_ids": [], "pad_id": 0, "batch_size": 3}
    [reply, *_] = loop.generate(plain, frozen, prompts(), **options)
    assert reply.harm == ()
    batch = assemble(prompts(), 3, 0, left_pad=True)
    whole = jax.jit(guided.logits)(params, batch), jax.jit(plain.logits)(frozen, batch)
    np.testing.assert_array_equal(*whole)  # whole sequences are the backbone's, bit for bit
