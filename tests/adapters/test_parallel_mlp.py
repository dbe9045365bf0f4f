import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.api import Site
from calyrex_jax.adapters.parallel_mlp import ParallelMlpConfig, matched_width
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.model import Model
from tests import tiny

SPEC = tiny.spec()


def model(placement="1,3", **changes):
    return Model(SPEC, (tiny.parallel_mlp(SPEC, placement, **changes),))


def mixed_batch(length=20, width=8):
    start, middle, none, several = tiny.conversations((9, 14, 5, 12))
    rows = [[start], [middle], [none], [several], [none, start, none], [middle, none]]
    return tiny.packed(rows, length, width)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("placement", "gate"), [("late8th", False), ("early8th", True)])
def test_at_initialisation_logits_equal_the_backbones_bit_for_bit(placement, gate, dtype):
    adapted = model(placement, gate_by_span=gate)
    params = {"backbone": tiny.backbone(SPEC, dtype=dtype), "adapters": adapted.init_adapters(jax.random.key(3))}
    expected = jax.jit(Model(SPEC).logits)(params, mixed_batch())
    found = jax.jit(adapted.logits)(params, mixed_batch())
    assert np.asarray(expected).tobytes() == np.asarray(found).tobytes()


@pytest.mark.parametrize("gate", [False, True])
def test_every_leaf_of_a_non_zero_state_matters(gate):
    adapted = model(gate_by_span=gate)
    params, batch, rng = tiny.params(adapted), mixed_batch(), np.random.default_rng(7)
    run = jax.jit(adapted.logits)
    before = run(params, batch)
    leaves = trees.flatten(params["adapters"])
    assert len(leaves) == 2 * 4
    for path, leaf in leaves.items():
        moved = leaves | {path: leaf + 0.05 * rng.normal(size=leaf.shape).astype(np.float32)}
        change = np.abs(run({**params, "adapters": trees.unflatten(moved)}, batch) - before).max()
        assert np.isfinite(change) and change > 1e-4, path


def test_only_the_down_projection_starts_at_zero():
    leaves = trees.flatten(tiny.parallel_mlp(SPEC, "3,4").init(jax.random.key(0)))
    for path, leaf in leaves.items():
        assert leaf.dtype == jnp.float32 and bool((leaf == 0).all()) == path.endswith("w_down"), path
    assert (leaves["boundary_3/w_up"] != leaves["boundary_4/w_up"]).any()


@pytest.mark.parametrize("gate", [False, True])
def test_a_block_equals_its_equations_written_as_a_plain_loop(gate):
    block = tiny.parallel_mlp(SPEC, "2", gate_by_span=gate)
    leaves, batch = tiny.perturbed(block.init(jax.random.key(0))["boundary_2"]), mixed_batch()
    x = np.random.default_rng(0).normal(size=(*batch.tokens.shape, SPEC.embed_dim)).astype(np.float32)
    found = np.asarray(jax.jit(block.apply)(leaves, Site(x, x, batch.positions, batch.segments, batch.span, 2)))
    p = {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}
    for row, position in np.argwhere(batch.segments > 0):
        segments, one = batch.segments[row], x[row, position].astype(np.float64)
        normed = one / np.sqrt((one * one).mean() + 1e-5) * p["mlp_norm"]
        inner = normed @ p["w_gate"]
        expected = one + (inner / (1 + np.exp(-inner)) * (normed @ p["w_up"])) @ p["w_down"]
        seen = [s for s in range(position + 1) if batch.system[row, s] and segments[s] == segments[position]]
        if gate and not seen:
            expected = one
        np.testing.assert_allclose(found[row, position], expected, rtol=0, atol=2e-5)


def test_gated_it_changes_nothing_without_a_system_prompt():
    batch = tiny.packed([[c] for c in tiny.without_system(tiny.conversations())], 16, 8)
    params = tiny.params(model())
    plain = np.asarray(jax.jit(Model(SPEC).logits)(params, batch))
    assert np.asarray(jax.jit(model(gate_by_span=True).logits)(params, batch)).tobytes() == plain.tobytes()
    assert np.abs(np.asarray(jax.jit(model().logits)(params, batch)) - plain).max() > 1e-2


@pytest.mark.parametrize("gate", [False, True])
def test_cached_generation_equals_uncached(gate):
    adapted = model(gate_by_span=gate)
    tiny.assert_cached_equals_uncached(adapted, tiny.params(adapted), new_tokens=5)


@pytest.mark.parametrize(
    ("budget", "blocks", "dim", "width"), [(5 * 1_328_256, 5, 576, 768), (3000, 1, 10, 100), (910, 1, 10, 30)]
)
def test_the_width_follows_from_the_budget(budget, blocks, dim, width):
    found = matched_width(budget, blocks, dim)
    assert found == width and abs(blocks * (3 * width + 1) * dim / budget - 1) <= 0.01


def test_what_cannot_be():
    with pytest.raises(UserError, match=r"parallel_mlp\.mlp_dim: no width gives CAL's 115 parameters within 1 %"):
        matched_width(115, 1, 10)
    with pytest.raises(UserError, match=r"parallel_mlp\.mlp_dim: 0 leaves no mlp"):
        ParallelMlpConfig(32, 0, 1e-5)
