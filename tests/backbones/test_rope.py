import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.backbones.named import NAMED, named_spec
from calyrex_jax.backbones.rope import RopeSpec, inverse_frequencies, phases, rotate

KINDS = {
    "default": RopeSpec(5e5),
    "linear": RopeSpec(1e4, "linear", 4.0),
    "llama3": named_spec("Llama-3.1-8B").rope,
    "yarn": RopeSpec(1e6, "yarn", 4.0, 32768, attention_factor=1.14),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("position", [8191, 131071])
def test_phases_are_those_of_float32_products_at_far_positions(name, position):
    rope = KINDS[name]
    cos, sin = phases(rope, 128, jnp.full((1, 1), position, jnp.int32), None)
    # the product is rounded once, in float32; its cosine is then exact to a few units in the last place
    angles = (np.float32(position) * inverse_frequencies(rope, 128)).astype(np.float64)
    np.testing.assert_allclose(cos[0, 0], np.cos(angles) * rope.attention_factor, atol=2e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin(angles) * rope.attention_factor, atol=2e-6)


def test_bfloat16_models_get_float32_phases_and_would_be_wrong_without():
    rope, positions = named_spec("SmolLM2-135M").rope, jnp.full((1, 1), 8191, jnp.int32)
    cos, sin = phases(rope, 64, positions, None)
    assert cos.dtype == sin.dtype == jnp.float32
    exact = np.cos(8191 * 1e5 ** -(np.arange(0, 64, 2) / 64))
    np.testing.assert_allclose(cos[0, 0], exact, atol=1e-3)
    coarse = jnp.cos(positions[..., None].astype(jnp.bfloat16) * inverse_frequencies(rope, 64).astype(jnp.bfloat16))
    assert np.abs(np.asarray(coarse[0, 0], np.float64) - exact).max() > 0.5


def test_llama3_keeps_fast_dimensions_and_slows_slow_ones():
    plain, scaled = inverse_frequencies(KINDS["default"], 128), inverse_frequencies(KINDS["llama3"], 128)
    np.testing.assert_array_equal(scaled[:20], plain[:20])
    np.testing.assert_allclose(scaled[-20:], plain[-20:] / 8, rtol=1e-6)
    assert np.all(np.diff(scaled) < 0)


def test_dynamic_base_is_fixed_by_each_rows_own_length():
    rope = RopeSpec(1e4, "dynamic", 2.0, 64)
    positions = jnp.full((3, 1), 50, jnp.int32)
    cos, _ = phases(rope, 16, positions, jnp.asarray([[51], [64], [200]]))
    np.testing.assert_array_equal(cos[0], cos[1])  # up to the original length nothing changes
    np.testing.assert_allclose(cos[0], phases(RopeSpec(1e4), 16, positions[:1], None)[0][0], atol=1e-6)
    base = 1e4 * (2.0 * 200 / 64 - 1) ** (16 / 14)
    np.testing.assert_allclose(cos[2, 0], np.cos(50 * base ** -(np.arange(0, 16, 2) / 16)), atol=2e-5)


def test_rotation_depends_on_the_distance_alone():
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 16)), jnp.float32) for _ in range(2))

    def score(q_position, k_position):
        turned = [
            rotate(x, *phases(RopeSpec(1e4), 16, jnp.full((1, 1), position), None))
            for x, position in ((q, q_position), (k, k_position))
        ]
        return float(jnp.sum(turned[0] * turned[1]))

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-2


def test_the_packaged_configs_have_their_published_bases():
    bases = {name: spec.rope.theta if (spec := named_spec(name)).rope else None for name in NAMED}
    assert bases == {
        "Llama-3.1-8B": 5e5,
        "Llama-3.2-3B": 5e5,
        "Qwen2.5-1.5B": 1e6,
        "Qwen2-1.5B": 1e6,
        "Mistral-7B-v0.2": 1e6,
        "GPT-2": None,
        "SmolLM2-135M": 1e5,
    }
