import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.analysis import patching, states
from calyrex_jax.analysis.states import Point, Shape, Walk, batch_of, points_of
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import stored
from calyrex_jax.generate import score
from calyrex_jax.model import Model
from tests import tiny
from tests.analysis import planted

PAIRS = planted.pairs(3)


def full_scores(model, params, readings):
    """Sums of the targets' log-probabilities by the way that `--mode=score` takes."""
    lines = score.scores(model, params, readings, pad_id=0)
    return [float(line[reading.targets].sum()) for line, reading in zip(lines, readings)]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_the_walk_gives_what_the_model_gives(family):
    """mistral has windows; the gpt2 here divides its scores by the layer's number."""
    spec = tiny.spec(family, **({"scale_attn_by_inverse_layer_idx": True} if family == "gpt2" else {}))
    assert spec.inverse_layer_scale == (family == "gpt2")
    model = tiny.model(spec, "2,4")
    params = tiny.params(model)
    readings = [reading for pair in PAIRS for reading in pair.first]
    batch = batch_of(readings, Shape.of(readings, len(readings)))
    walk = Walk(model, params)
    found = walk.onwards(0, walk.start(batch), batch)
    np.testing.assert_allclose(found, full_scores(model, params, readings), rtol=2e-5)


def test_stored_bfloat16_layers():
    model = tiny.model(tiny.spec(), "4")
    params = tiny.params(model, dtype=jnp.bfloat16)
    readings = list(PAIRS[0].first)
    batch, plain = batch_of(readings, Shape.of(readings, 2)), Walk(model, params)
    packed = Walk(
        model, params | {"backbone": params["backbone"] | {"layers": jax.tree.map(stored, params["backbone"]["layers"])}}
    )
    assert jax.tree.leaves(packed.params["backbone"]["layers"])[0].dtype == jnp.uint16
    np.testing.assert_array_equal(*(walk.onwards(0, walk.start(batch), batch) for walk in (plain, packed)))


def test_layers_share_one_program():
    states._layer.clear_cache()
    model = Model(tiny.spec())
    walk = Walk(model, {"backbone": tiny.backbone(model.spec), "adapters": {}})
    batch = batch_of(PAIRS[0].plain, Shape.of(PAIRS[0].plain, 2))
    walk.onwards(0, walk.start(batch), batch)
    assert states._layer._cache_size() == 1


def test_an_adapter_within_the_layers_is_refused():
    inside = dataclasses.replace(tiny.model(tiny.spec(), "4").adapters[0], boundaries=(), name="lora")
    with pytest.raises(UserError, match="lora changes the layers themselves"):
        Walk(Model(tiny.spec(), (inside,)), {})


def test_points():
    model = tiny.model(tiny.spec(), "0,4")
    assert [str(point) for point in points_of(model)] == ["0", "0+", "1", "2", "3", "4", "4+"]
    assert points_of(model)[1] == Point(0, True)


def test_patching_everything_is_the_other_run():
    """On random weights: at the ends of depth, each patch is exactly one of the two whole runs; copied tokens too."""
    model = tiny.model(tiny.spec(), "1,3", copy=True)
    params = tiny.params(model)
    found = patching.measure(Walk(model, params), PAIRS, 4)
    expected = np.reshape(full_scores(model, params, [two[0] for p in PAIRS for two in (p.first, p.second)]), (-1, 2))
    np.testing.assert_allclose(found.own, expected, rtol=2e-5)
    expected = np.reshape(full_scores(model, params, [two[1] for p in PAIRS for two in (p.first, p.second)]), (-1, 2))
    np.testing.assert_allclose(found.other, expected, rtol=2e-5)
    question, system = found.patched
    for values, whole in (
        (question[0], found.own),
        (question[-1], found.other),
        (system[0], found.other),
        (system[-1], found.own),
    ):
        np.testing.assert_allclose(values, whole, rtol=2e-5)
    assert np.abs(found.own - found.other).max() > 0.05
    assert np.abs(question[3] - found.own).max() > 1e-3 and np.abs(question[3] - found.other).max() > 1e-3


def test_places_and_patched_positions():
    reading = PAIRS[0].first[0]  # 6 [10 word 11] 7 q q q 8 reply reply END
    batch = batch_of([reading], Shape.of([reading], 2))
    last, answer = (np.flatnonzero(mask[0]).tolist() for mask in patching._places(batch))
    assert last == [8] and answer == [9, 10]
    assert np.flatnonzero(patching.after_system(batch)[0]).tolist() == list(range(4, 12))
    assert not patching.after_system(batch)[1].any()


def test_batches_and_batch_sizes_do_not_matter():
    model = tiny.model(tiny.spec(), "1,3")
    walk = Walk(model, tiny.params(model))
    a, b = patching.measure(walk, PAIRS, 2), patching.measure(walk, PAIRS, 6)
    for field in dataclasses.fields(a):
        np.testing.assert_allclose(getattr(a, field.name), getattr(b, field.name), rtol=2e-4, atol=1e-5, err_msg=field.name)
    assert a.distance.shape == (7, 3, 2) and a.features.shape == (7, 3, 2, 2, 32) and a.patched.shape == (2, 7, 3, 2)


def test_distance_and_cosine_are_their_definitions():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 5, 8)).astype(np.float32)
    places = np.zeros((4, 2, 5), bool)
    places[:, 0, 1] = places[:, 1, 2:4] = True
    distance, cosine, features = map(np.asarray, patching._distances(x, places))
    a, b = x[2], x[3]
    norm = np.linalg.norm
    each = [(norm(a[t] - b[t]) * 2 / (norm(a[t]) + norm(b[t])), a[t] @ b[t] / norm(a[t]) / norm(b[t])) for t in (1, 2, 3)]
    np.testing.assert_allclose(distance[1], [each[0][0], (each[1][0] + each[2][0]) / 2], rtol=1e-5)
    np.testing.assert_allclose(cosine[1], [each[0][1], (each[1][1] + each[2][1]) / 2], rtol=1e-5)
    np.testing.assert_allclose(features[1, 1, 1], b[2:4].mean(0), rtol=1e-5)
