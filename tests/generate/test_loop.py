import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.core.errors import UserError
from calyrex_jax.generate import loop
from calyrex_jax.generate.sampling import Sampling
from tests import tiny

PROMPT, NEW = 16, 8  # padded prompt length and decoded tokens of the tests below the loop
MODELS = {
    "frozen": ("llama", None, {}),
    "late8th": ("llama", "late8th", {}),
    "explicit": ("llama", "1,3", {"rope_theta": 100.0}),
    "boundary 0": ("llama", "0", {}),
    "boundary L": ("llama", "4", {}),
    "keys=all": ("llama", "1,4", {"keys": "all"}),
    "gate off": ("llama", "1,4", {"gate_mlp_by_span": False}),
    "gate off, keys=all": ("llama", "2", {"gate_mlp_by_span": False, "keys": "all", "rope_theta": 100.0}),
    "copying": ("llama", "late8th", {"copy": True}),
    "copying, keys=all": ("llama", "1,4", {"copy": True, "keys": "all"}),
    "gpt2 frozen": ("gpt2", None, {}),
    "gpt2": ("gpt2", "late8th", {}),
    "sliding frozen": ("mistral", None, {}),
    "sliding": ("mistral", "late8th", {}),
    "dynamic frozen": ("dynamic", None, {}),
}


@functools.cache
def made(name):
    family, placement, changes = MODELS[name]
    model = tiny.model(tiny.spec(family), placement, **changes)
    return model, tiny.params(model)


def reply_batch(prompts, replies, width=8):
    """Each prompt with its reply as one row, padded on the right to a shape that all cases share."""
    rows = [
        [tiny.Conversation(np.concatenate([p.tokens, r]), np.concatenate([p.system, np.zeros(len(r), bool)]))]
        for p, r in zip(prompts, replies)
    ]
    return tiny.packed(rows, PROMPT + NEW, width)


@functools.cache
def uncached(model):
    """Logits of whole sequences; a dynamic rotary base is fixed from prompt and new tokens, as decoding does."""

    def logits(params, batch, total):
        if model.spec.rope is None or model.spec.rope.kind != "dynamic":
            return model.logits(params, batch)
        context = decoder.make_context(model.spec, batch.positions, batch.segments, total)
        x = decoder.embed(model.spec, params["backbone"], batch.tokens, batch.positions)
        x, _ = decoder.run_layers(model.spec, params["backbone"]["layers"], x, context, 0, model.spec.num_layers)
        return decoder.logits(model.spec, params["backbone"], decoder.final_norm(model.spec, params["backbone"], x))

    return jax.jit(logits)


@pytest.mark.parametrize("name", MODELS)
def test_cached_and_batched_equals_uncached_and_single(name):
    """Left-padded prompts of unequal length, read at once and continued token by token, against every row on its own."""
    model, params = made(name)
    prompts = tiny.conversations((9, 14, 5, 12))
    replies = np.random.default_rng(5).integers(0, tiny.VOCAB, (4, NEW)).astype(np.int32)
    head = functools.partial(decoder.logits, model.spec, params["backbone"])

    @jax.jit
    def run(params, batch, replies):
        x, state = model.prefill(params, batch, PROMPT + NEW, NEW)

        def one(state, token):
            x, state = model.decode(params, token, state)
            return state, x

        _, rest = jax.lax.scan(one, state, replies.T)
        return jnp.concatenate([x[None], rest])

    batch = tiny.packed([[p] for p in prompts], PROMPT, left_pad=True)
    found = np.asarray(head(run(params, batch, replies)))  # [NEW + 1, B, V]
    whole = uncached(model)
    for row, prompt in enumerate(prompts):
        size = len(prompt.tokens)
        total = jnp.array([size + NEW], jnp.int32)
        alone = np.asarray(whole(params, reply_batch([prompt], replies[row : row + 1]), total))[0]
        expected = alone[size - 1 : size + NEW]
        np.testing.assert_allclose(found[:, row], expected, rtol=0, atol=1e-4 * np.abs(expected).max())


def naive(model, params, prompt, count):
    """Greedy by running the whole sequence again for every token, and the smallest gap to the second choice."""
    whole, made, gap = uncached(model), np.zeros(0, np.int32), np.inf
    for _ in range(count):
        batch = reply_batch([prompt], [made])
        logits = np.asarray(whole(params, batch, jnp.array([len(prompt.tokens) + count], jnp.int32)))
        line = logits[0, len(prompt.tokens) + len(made) - 1]
        best = np.sort(line)[-2:]
        gap = min(gap, best[1] - best[0])
        made = np.append(made, np.int32(line.argmax()))
    return made.tolist(), gap


@pytest.mark.parametrize("name", ["frozen", "explicit", "keys=all", "gpt2", "dynamic frozen"])
def test_greedy_replies_equal_recomputing_the_whole_sequence(name):
    model, params = made(name)
    prompts = tiny.conversations((9, 14, 5, 12))
    replies = loop.generate(model, params, prompts, max_new_tokens=NEW, stop_ids=[], pad_id=0, batch_size=4)
    for row, prompt in enumerate(prompts):
        expected, gap = naive(model, params, prompt, NEW)
        assert gap < 1e-3 or list(replies[row].tokens) == expected
        assert (replies[row].row, replies[row].finish_reason) == (row, "length")


def reply(model, params, prompts, **changes):
    options = {"max_new_tokens": NEW, "stop_ids": [], "pad_id": 0, "batch_size": 4}
    return loop.generate(model, params, prompts, **options | changes)


@pytest.mark.parametrize(
    ("sampling", "lengths"),
    [
        (Sampling(), (9, 14, 5, 12)),
        (Sampling(1.5, seed=3), (9, 14, 5, 12)),
        (Sampling(1.5, top_k=20, seed=3), (9, 14, 5, 12)),
        (Sampling(1.5, top_p=0.9, seed=3), (9, 14, 5, 12, 40)),  # two length buckets
    ],
)
def test_a_reply_does_not_depend_on_its_batch(sampling, lengths):
    model, params = made("explicit")
    prompts = tiny.conversations(lengths)
    expected = reply(model, params, prompts, sampling=sampling, batch_size=3)
    assert [r.row for r in expected] == list(range(len(lengths)))
    assert reply(model, params, prompts, sampling=sampling, batch_size=1) == expected


def test_seeds_and_lines_differ():
    model, params = made("frozen")
    prompts = tiny.conversations((9,)) * 5
    first = [r.tokens for r in reply(model, params, prompts, sampling=Sampling(1.0, seed=0))]
    assert len(set(first)) == 5  # the same prompt on five lines
    assert first == [r.tokens for r in reply(model, params, prompts, sampling=Sampling(1.0, seed=0))]
    assert first != [r.tokens for r in reply(model, params, prompts, sampling=Sampling(1.0, seed=1))]


def test_every_stop_id_ends_its_row_alone():
    model, params = made("frozen")
    prompts = tiny.conversations((9, 14, 5, 12))
    sampling = Sampling(2.0, seed=1)
    free = reply(model, params, prompts, sampling=sampling)
    stops = [free[0].tokens[2], free[1].tokens[0], free[3].tokens[5]]
    cut = reply(model, params, prompts, sampling=sampling, stop_ids=stops)
    for before, after in zip(free, cut):
        ends = [i for i, token in enumerate(before.tokens) if token in stops]
        if ends:
            assert after.tokens == before.tokens[: ends[0] + 1] and after.finish_reason == "stop"
            assert after.text_tokens == before.tokens[: ends[0]]
        else:
            assert after.tokens == before.tokens == after.text_tokens and after.finish_reason == "length"
    assert cut[1].text_tokens == () and cut[1].finish_reason == "stop"


def test_a_stop_id_as_the_last_allowed_token_counts_as_stop():
    model, params = made("frozen")
    prompts = tiny.conversations((9,))
    token = reply(model, params, prompts)[0].tokens[0]
    only = reply(model, params, prompts, max_new_tokens=1, stop_ids=[token])[0]
    assert (only.tokens, only.text_tokens, only.finish_reason) == ((token,), (), "stop")
    only = reply(model, params, prompts, max_new_tokens=1, stop_ids=[token + 1])[0]
    assert (only.tokens, only.finish_reason) == ((token,), "length")


def test_one_compilation_for_each_prompt_and_span_bucket():
    model, params = made("late8th")
    options = {"max_new_tokens": 3, "batch_size": 2}
    before = loop._run._cache_size()
    reply(model, params, tiny.conversations((9, 14, 5, 12, 30)), **options)  # an uneven last batch
    assert loop._run._cache_size() == before + 1
    other = jax.tree.map(lambda leaf: leaf * 1.01, params)
    reply(model, other, tiny.conversations((20, 7, 3, 31)), **options)  # other weights, another input
    assert loop._run._cache_size() == before + 1
    reply(model, params, tiny.conversations((40, 64)), **options)
    assert loop._run._cache_size() == before + 2
    reply(model, params, tiny.without_system(tiny.conversations((9, 9))), **options)
    assert loop._run._cache_size() == before + 3
    warm = Sampling(1.0, seed=1)
    reply(model, params, tiny.conversations((9, 9)), sampling=warm, **options)
    reply(model, params, tiny.conversations((9, 9)), sampling=Sampling(1.0, seed=2), **options)  # a seed is no constant
    assert loop._run._cache_size() == before + 4


def test_weights_are_arguments_and_not_constants():
    model, params = made("late8th")
    batch = tiny.packed([[c] for c in tiny.conversations()], PROMPT, left_pad=True)
    rows, stops = np.arange(4, dtype=np.int32), np.zeros(1, np.int32)
    text = loop._run.lower(model, 3, Sampling(), 97, params, None, stops, np.uint32(0), batch, rows).as_text()
    smallest = min(leaf.size for leaf in jax.tree.leaves(params) if leaf.ndim > 1)
    constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
    assert constants and all(len(line) < 8 * smallest for line in constants)


def test_replies_come_in_order_while_later_batches_still_wait():
    model, params = made("frozen")
    seen = []
    lengths = (9,) * 40
    replies = loop.stream(
        model, params, tiny.conversations(lengths), max_new_tokens=2, stop_ids=[], pad_id=0, batch_size=2,
        progress=lambda done, tokens: seen.append((done, tokens)),
    )  # fmt: skip
    assert next(replies).row == 0 and seen == [(2, 4)]
    assert [r.row for r in replies] == list(range(1, 40))
    assert seen[-1] == (40, 80) and len(seen) == 20


def test_comparing_trained_states_equals_generating_with_each():
    model, params = made("late8th")
    variants = {
        "trained": params["adapters"],
        "other": tiny.perturbed(params["adapters"]),
        "fresh": model.init_adapters(jax.random.key(0)),
    }
    prompts = tiny.conversations((9, 14, 5))
    stops = [reply(model, params, prompts)[0].tokens[2]]
    options = {"max_new_tokens": NEW, "stop_ids": stops, "pad_id": 0, "batch_size": 2}
    found = loop.compare(model, params["backbone"], variants, prompts, **options)
    assert list(found) == list(variants) and found["trained"] != found["other"]
    for name, adapters in variants.items():
        assert found[name] == loop.generate(model, {**params, "adapters": adapters}, prompts, **options)
    assert found["fresh"] == loop.generate(tiny.model(model.spec), {**params, "adapters": {}}, prompts, **options)


@pytest.mark.parametrize("name", ["late8th", "keys=all", "gpt2", "sliding"])
def test_layers_of_their_own_change_no_reply(name, monkeypatch):
    """Sampled replies: small differences in the logits would show."""
    model, params = made(name)
    prompts, sampling = tiny.conversations((9, 14, 5)), Sampling(1.5, seed=3)
    expected = reply(model, params, prompts, sampling=sampling)
    options = {"max_new_tokens": NEW, "stop_ids": [], "pad_id": 0, "batch_size": 4}
    compared = loop.compare(model, params["backbone"], {"a": params["adapters"]}, prompts, **options)
    unstacked = []
    monkeypatch.setattr(loop, "worth_unstacking", lambda layers, steps, shapes: unstacked.append((steps, shapes)) or True)
    assert reply(model, params, prompts, sampling=sampling) == expected
    assert loop.compare(model, params["backbone"], {"a": params["adapters"]}, prompts, **options) == compared
    assert unstacked == [(NEW, 1), (NEW, 1)]


def test_layers_are_unstacked_where_that_pays(monkeypatch):
    """SmolLM2-135M's 30 layers: for a thousand steps of one shape, not for forty, nor for an evaluation of many shapes."""
    layers = {"w": jax.ShapeDtypeStruct((30, 3538944), jnp.float32)}
    assert loop.worth_unstacking(layers, 1000, 1)
    for narrow in (jnp.bfloat16, jnp.uint16):
        assert not loop.worth_unstacking({"w": jax.ShapeDtypeStruct((30, 3538944), narrow)}, 1000, 1)
    assert not loop.worth_unstacking(layers, 40, 1) and not loop.worth_unstacking(layers, 1000, 7)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not loop.worth_unstacking(layers, 1000, 1)
    monkeypatch.undo()
    monkeypatch.setattr(loop, "_MEMORY_SHARE", 1e-9)
    assert not loop.worth_unstacking(layers, 1000, 1)


def test_no_prompts_no_replies():
    model, params = made("frozen")
    assert reply(model, params, []) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 0}, "config.generate.max_new_tokens: got 0, expected at least 1"),
        ({"batch_size": 0}, "config.generate.batch_size: got 0, expected at least 1"),
        ({"max_new_tokens": 250, "where": ["a.jsonl:1", "a.jsonl:7"]}, "a.jsonl:7: 14 tokens and 250 new ones"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_runs(changes, message):
    model, params = made("frozen")
    with pytest.raises(UserError, match=message):
        loop.stream(
            model, params, tiny.conversations((6, 14)), **{"max_new_tokens": 4, "stop_ids": [], "pad_id": 0} | changes
        )
