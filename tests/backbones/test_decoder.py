import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.cache import check_capacity, extend, init_cache
from calyrex_jax.backbones.rope import RopeSpec
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import stored
from calyrex_jax.core.trees import flatten, map_with_path

COMMON = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
COMMON |= {"num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
CONFIGS = {
    "llama": {**COMMON, "model_type": "llama"},
    "qwen2": {**COMMON, "model_type": "qwen2", **WINDOWS, "tie_word_embeddings": True},
    "mistral": {**COMMON, "model_type": "mistral", "sliding_window": 6},
    "gpt2": {**GPT2, "layer_norm_epsilon": 1e-5, "scale_attn_by_inverse_layer_idx": True},
    "dynamic": {**COMMON, "model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 4.0}},
}
SPECS = {name: DecoderSpec.from_config(config) for name, config in CONFIGS.items()}


@functools.cache
def backbone_of(spec):
    """Parameters large enough that attention is far from uniform."""
    tree = decoder.init_params(spec, jax.random.key(0), jnp.float32)
    return map_with_path(lambda path, leaf: leaf if "norm" in path else leaf * 10, tree)


@functools.partial(jax.jit, static_argnums=0)
def hidden(spec, tree, tokens, positions, segments, total_lengths=None):
    context = decoder.make_context(spec, positions, segments, total_lengths)
    x = decoder.embed(spec, tree, tokens, positions)
    return decoder.run_layers(spec, tree["layers"], x, context, 0, spec.num_layers)[0]


@functools.partial(jax.jit, static_argnums=0)
def logits(spec, tree, tokens, positions, segments, total_lengths=None):
    x = hidden(spec, tree, tokens, positions, segments, total_lengths)
    return decoder.logits(spec, tree, decoder.final_norm(spec, tree, x))


def row(tokens):
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    return tokens, jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], jnp.ones_like(tokens)


def prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 61, length) for length in lengths]


def left_padded(rows, width):
    tokens, positions, segments = (np.zeros((len(rows), width), np.int32) for _ in range(3))
    for index, tokens_of_row in enumerate(rows):
        pad = width - len(tokens_of_row)
        tokens[index, pad:], segments[index, pad:] = tokens_of_row, 1
        positions[index, pad:] = np.arange(len(tokens_of_row))
    return tuple(jnp.asarray(array) for array in (tokens, positions, segments))


def assert_close(got, want, tolerance=1e-4):
    want = np.asarray(want)
    assert np.abs(np.asarray(got) - want).max() <= tolerance * np.abs(want).max()


@pytest.mark.parametrize("name", SPECS)
def test_cached_prefill_and_decode_equal_the_full_forward(name):
    spec, (whole, short) = SPECS[name], prompts(48, 44)
    tree = backbone_of(spec)
    total = jnp.asarray([48, 44])
    want = [logits(spec, tree, *row(tokens))[0] for tokens in (whole, short)]

    @jax.jit
    def step(tree, tokens, positions, segments, cache):
        cache = extend(cache, positions, segments)
        context = decoder.make_context(spec, positions, segments, total)
        x = decoder.embed(spec, tree, tokens, positions)
        fill = tokens.shape[1] > 1
        x, cache = decoder.run_layers(spec, tree["layers"], x, context, 0, 2, cache, fill=fill)
        x, cache = decoder.run_layers(spec, tree["layers"], x, context, 2, 3, cache, fill=fill)
        return decoder.logits(spec, tree, decoder.final_norm(spec, tree, x)), cache

    prefix = 40
    tokens, positions, segments = left_padded([whole[:prefix], short[: prefix - 4]], prefix)
    got, cache = step(tree, tokens, positions, segments, init_cache(spec, 2, 50, jnp.float32))
    assert_close(got[0], want[0][:prefix])
    assert_close(got[1, 4:], want[1][: prefix - 4])
    for index in range(prefix, 48):
        tokens = jnp.asarray([[whole[index]], [short[index - 4]]])
        positions = jnp.asarray([[index], [index - 4]])
        got, cache = step(tree, tokens, positions, jnp.ones_like(positions), cache)
        assert_close(got[:, 0], jnp.stack([want[0][index], want[1][index - 4]]))
    assert int(cache.length) == 48 and int(cache.start) == 47


def test_several_tokens_may_be_added_to_a_cache_at_once():
    spec, (tokens,) = SPECS["qwen2"], prompts(30)
    tree = backbone_of(spec)
    want = logits(spec, tree, *row(tokens))[0]
    cache, got = init_cache(spec, 1, 30, jnp.float32), []
    for low, high in ((0, 12), (12, 17), (17, 30)):
        part, positions, segments = (array[:, low:high] for array in row(tokens))
        cache = extend(cache, positions, segments)
        x = decoder.embed(spec, tree, part, positions)
        context = decoder.make_context(spec, positions, segments)
        x, cache = decoder.run_layers(spec, tree["layers"], x, context, 0, 3, cache, fill=low == 0)
        got.append(decoder.logits(spec, tree, decoder.final_norm(spec, tree, x))[0])
    assert_close(jnp.concatenate(got), want)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "dynamic"])
def test_padding_on_either_side_changes_nothing(name):
    spec, rows = SPECS[name], prompts(9, 40)
    tree = backbone_of(spec)
    left = logits(spec, tree, *left_padded(rows, 45))
    flip = [array[:, ::-1] for array in left_padded([tokens[::-1] for tokens in rows], 45)]
    positions = jnp.where(flip[2] > 0, jnp.arange(45), 0)
    right = logits(spec, tree, flip[0], positions, flip[2])
    for index, tokens in enumerate(rows):
        want = logits(spec, tree, *row(tokens))[0]
        assert_close(left[index, 45 - len(tokens) :], want)
        assert_close(right[index, : len(tokens)], want)
    assert np.all(np.isfinite(left)) and np.all(np.isfinite(right))


@pytest.mark.parametrize("name", ["mistral", "qwen2", "gpt2", "dynamic"])
def test_packed_segments_equal_separate_rows(name):
    spec, rows = SPECS[name], prompts(9, 45, 9)
    tree = backbone_of(spec)
    tokens = jnp.asarray(np.concatenate(rows))[None]
    positions = jnp.concatenate([jnp.arange(len(part)) for part in rows])[None]
    segments = jnp.concatenate([jnp.full(len(part), number) for number, part in enumerate(rows, 1)])[None]
    got, start = logits(spec, tree, tokens, positions, segments)[0], 0
    for part in rows:
        assert_close(got[start : start + len(part)], logits(spec, tree, *row(part))[0])
        start += len(part)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_later_tokens_and_other_segments_are_not_seen(name):
    spec, (tokens,) = SPECS[name], prompts(20)
    tree = backbone_of(spec)
    base = row(tokens)
    changed = (base[0].at[0, 12].set((base[0][0, 12] + 1) % 61), *base[1:])
    before, after = logits(spec, tree, *base)[0], logits(spec, tree, *changed)[0]
    np.testing.assert_array_equal(before[:12], after[:12])
    assert np.all(np.abs(np.asarray(before - after))[12:].max(-1) > 1e-3)


def test_gradients_are_finite_in_rows_of_nothing_but_padding():
    spec = SPECS["llama"]
    tree = backbone_of(spec)
    tokens, positions, segments = left_padded([prompts(12)[0], []], 16)

    def loss(tree):
        return jnp.sum(jnp.square(logits(spec, tree, tokens, positions, segments))[0, 4:])

    for path, grad in flatten(jax.grad(loss)(tree)).items():
        assert np.all(np.isfinite(grad)), path
        assert np.any(np.asarray(grad) != 0), path


def test_running_layers_in_parts_equals_running_them_at_once():
    spec, (tokens,) = SPECS["qwen2"], prompts(20)
    tree = backbone_of(spec)
    tokens, positions, segments = row(tokens)
    context = decoder.make_context(spec, positions, segments)
    x = decoder.embed(spec, tree, tokens, positions)
    whole, _ = decoder.run_layers(spec, tree["layers"], x, context, 0, 3)
    for start, stop in ((0, 1), (1, 1), (1, 3)):
        x, cache = decoder.run_layers(spec, tree["layers"], x, context, start, stop)
        assert cache is None
    np.testing.assert_allclose(x, whole, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_layer_gives_the_same_bits_in_a_loop_and_between_additions_of_zero():
    spec, (tokens,) = SPECS["llama"], prompts(20)
    tree = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), backbone_of(spec))
    tokens, positions, segments = row(tokens)

    def run(tree, zeros, cuts):
        context = decoder.make_context(spec, positions, segments)
        x = decoder.embed(spec, tree, tokens, positions)
        for start, stop in itertools.pairwise(sorted({0, *cuts, 3})):
            x, _ = decoder.run_layers(spec, tree["layers"], x, context, start, stop)
            if stop in cuts:  # what an adapter adds at its initialisation
                x = x + decoder.norm(spec, x, zeros)
        return decoder.logits(spec, tree, decoder.final_norm(spec, tree, x))

    run, zeros = jax.jit(run, static_argnums=2), jnp.zeros(32, jnp.bfloat16)
    whole = run(tree, zeros, ())
    for cuts in ((1,), (2,), (1, 2), (3,)):
        np.testing.assert_array_equal(run(tree, zeros, cuts), whole)


def test_separate_layers_equal_the_stack_with_and_without_a_cache():
    spec, (tokens,) = SPECS["qwen2"], prompts(12)
    tree = backbone_of(spec)
    parts = decoder.unstack(tree["layers"])
    assert len(parts) == 3 and parts[1]["attn"]["w_o"].shape == (4, 8, 32)
    tokens, positions, segments = row(tokens)
    context = decoder.make_context(spec, positions, segments)
    x = decoder.embed(spec, tree, tokens, positions)
    empty = extend(init_cache(spec, 1, 16, jnp.float32), positions, segments)
    for fill, cache in ((False, None), (True, empty), (False, empty)):
        want, want_cache = decoder.run_layers(spec, tree["layers"], x, context, 0, 3, cache, fill)
        got, got_cache = decoder.run_layers(spec, parts, x, context, 0, 3, cache, fill)
        chex.assert_trees_all_close((got, got_cache), (want, want_cache), rtol=1e-5, atol=1e-5)


def test_a_stored_stack_gives_the_same_bits_and_the_same_separate_layers():
    spec, (tokens,) = SPECS["llama"], prompts(12)
    tree = decoder.init_params(spec, jax.random.key(1), jnp.bfloat16)
    kept = jax.tree.map(stored, tree["layers"])
    tokens, positions, segments = row(tokens)
    context = decoder.make_context(spec, positions, segments)
    x = decoder.embed(spec, tree, tokens, positions)
    run = jax.jit(lambda layers: decoder.run_layers(spec, layers, x, context, 0, 3)[0])
    chex.assert_trees_all_equal(run(kept), run(tree["layers"]))
    chex.assert_trees_all_equal(decoder.unstack(kept), decoder.unstack(tree["layers"]))
    assert {leaf.dtype for leaf in jax.tree.leaves(decoder.unstack(kept))} == {jnp.dtype(jnp.bfloat16)}


def test_bfloat16_stays_close_to_float32_and_returns_float32_logits():
    spec, (tokens,) = SPECS["llama"], prompts(24)
    tree = decoder.init_params(spec, jax.random.key(1), jnp.float32)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)
    assert hidden(spec, half, *row(tokens)).dtype == jnp.bfloat16
    got = logits(spec, half, *row(tokens))
    assert got.dtype == jnp.float32
    assert_close(got, logits(spec, tree, *row(tokens)), tolerance=3e-2)


@pytest.mark.parametrize("name", SPECS)
def test_init_and_abstract_trees_agree(name):
    spec = SPECS[name]
    abstract, real = decoder.abstract_params(spec, jnp.bfloat16), decoder.init_params(spec, jax.random.key(0), jnp.bfloat16)
    as_shapes = {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(real).items()}
    assert {path: (leaf.shape, leaf.dtype) for path, leaf in flatten(abstract).items()} == as_shapes
    assert ("head/w" in as_shapes) == (not spec.tied)
    assert ("layers/attn/b_q" in as_shapes) == spec.qkv_bias


def test_the_head_is_the_embedding_where_tied():
    tied, untied = SPECS["qwen2"], SPECS["llama"]
    tree = backbone_of(tied)
    assert decoder.head_matrix(tree) is tree["embed"]["tokens"]
    tree = backbone_of(untied)
    assert decoder.head_matrix(tree) is tree["head"]["w"]


def test_compile_size_does_not_grow_with_depth_and_no_stack_is_copied():
    config = {**CONFIGS["llama"], "hidden_size": 64, "intermediate_size": 512, "head_dim": 16}

    def compiled(layers):
        spec = DecoderSpec.from_config({**config, "num_hidden_layers": layers})
        tree = decoder.abstract_params(spec, jnp.float32)
        x = jax.ShapeDtypeStruct((1, 8, 64), jnp.float32)

        def run(layers_tree, x):
            _, positions, segments = row(np.zeros(8))
            context = decoder.make_context(spec, positions, segments)
            return decoder.run_layers(spec, layers_tree, x, context, 1, layers - 1)[0]

        stacked = sum(leaf.size * 4 for leaf in jax.tree.leaves(tree["layers"]))
        return jax.jit(run).lower(tree["layers"], x).compile(), stacked / layers

    (small, one_layer), (large, _) = compiled(4), compiled(24)
    instructions = [executable.as_text().count(" = ") for executable in (small, large)]
    assert instructions[1] == instructions[0]
    assert large.memory_analysis().temp_size_in_bytes < 3 * one_layer


def test_backward_through_frozen_layers_does_not_save_their_weights():
    spec = dataclasses.replace(SPECS["llama"], num_layers=24, windows=(None,) * 24, mlp_dim=1024)
    tree = decoder.abstract_params(spec, jnp.float32)
    x = jax.ShapeDtypeStruct((1, 8, 32), jnp.float32)

    def loss(x, layers_tree):
        _, positions, segments = row(np.zeros(8))
        context = decoder.make_context(spec, positions, segments)
        return jnp.sum(decoder.run_layers(spec, layers_tree, x, context, 0, 24)[0])

    memory = jax.jit(jax.grad(loss)).lower(x, tree["layers"]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < memory.argument_size_in_bytes / 2


def test_a_decode_step_updates_a_donated_cache_in_place():
    spec = dataclasses.replace(SPECS["llama"], num_layers=16, windows=(None,) * 16)
    tree = decoder.abstract_params(spec, jnp.float32)
    cache = jax.eval_shape(lambda: init_cache(spec, 2, 4096, jnp.float32))

    def step(tree, tokens, cache):
        positions = jnp.broadcast_to(cache.length, tokens.shape)
        cache = extend(cache, positions, jnp.ones_like(positions))
        context = decoder.make_context(spec, positions, jnp.ones_like(positions))
        x = decoder.embed(spec, tree, tokens, positions)
        return decoder.run_layers(spec, tree["layers"], x, context, 0, 16, cache)

    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    memory = jax.jit(step, donate_argnums=2).lower(tree, tokens, cache).compile().memory_analysis()
    whole = 2 * cache.k.size * 4
    assert memory.alias_size_in_bytes >= whole
    assert memory.temp_size_in_bytes < whole / 4


def test_dynamic_rows_keep_the_base_that_their_total_length_fixes():
    spec, (tokens,) = SPECS["dynamic"], prompts(48)
    tree = backbone_of(spec)
    full = logits(spec, tree, *row(tokens))
    start = tuple(array[:, :20] for array in row(tokens))
    assert_close(logits(spec, tree, *start, total_lengths=jnp.asarray([48])), full[:, :20])
    assert np.abs(np.asarray(logits(spec, tree, *start) - full[:, :20])).max() > 1e-2
    assert spec.rope == RopeSpec(1e4, "dynamic", 4.0, 32)


def test_a_cache_that_is_too_small_is_refused():
    check_capacity(64, 64, "row 0")
    with pytest.raises(UserError, match="row 3: needs 65 cache slots but only 64"):
        check_capacity(64, 65, "row 3")
