"""The planted case: the layer that moves the rule must be found by distance, probe and patching alike."""

import numpy as np
import pytest

from calyrex_jax.analysis import attention, findings, patching
from calyrex_jax.analysis.probes import ProbeSettings
from calyrex_jax.analysis.states import Walk
from calyrex_jax.model import Model
from tests.analysis import planted


def analysed(walk, count=24):
    pairs = planted.pairs(count)
    measured = patching.measure(walk, pairs, 10)
    settings = ProbeSettings(folds=4, permutations=40)
    return measured, findings.summarise(walk.points, [pair.fact for pair in pairs], measured, settings)


def assert_found(walk, measured, found, point):
    """All four measures change at `point` and nowhere else."""
    names = [str(p) for p in walk.points]
    at = names.index(point)
    assert (measured.distance[:at] == 0).all() and (measured.distance[at:] > 0.05).all()
    np.testing.assert_allclose(measured.cosine[:at], 1, atol=1e-6)
    assert (measured.cosine[at:] < 0.999).all()
    marks = findings.landmarks(found)
    assert marks == {
        "readable_last_prompt": point,
        "readable_answer": point,
        "question_takes_over": point,
        "system_lets_go": point,
        "largest_step": point,
    }
    for i, layer in enumerate(found.layers):
        for place in patching.PLACES:
            assert layer.probe[place].value == (0.5 if i < at else 1.0), (names[i], place)
            assert layer.shuffled[place].low <= 0.5 <= layer.shuffled[place].high
            assert (layer.p_value[place] <= 1 / 41 + 1e-9) == (i >= at)
        effects = layer.effect["question"].value, layer.effect["system"].value
        np.testing.assert_allclose(effects, (0, 1) if i < at else (1, 0), atol=1e-5, err_msg=names[i])
    assert found.whole.value > 5 and found.whole.n == len(measured.own)


@pytest.mark.parametrize("layer", [0, 3])
def test_the_layer_that_moves_the_rule_is_found(layer):
    walk = Walk(Model(planted.SPEC), {"backbone": planted.backbone(layer), "adapters": {}})
    assert_found(walk, *analysed(walk), str(layer + 1))


def test_the_cal_block_that_moves_the_rule_is_found_and_looks_at_its_word():
    model, params = planted.with_cal(4, copies=2)
    walk = Walk(model, params)
    assert [str(point) for point in walk.points] == ["0", "1", "2", "3", "3+", "4", "4+", "5", "6"]
    assert_found(walk, *analysed(walk), "4+")

    readings = [pair.first[0] for pair in planted.pairs(3)]
    seen = attention.collect(model, params, model.adapters[0], [readings], (0,))
    assert seen.boundaries == (3, 4) and seen.mass.shape == (2, planted.SPEC.num_heads, 3, 1, 3)
    np.testing.assert_allclose(seen.mass.sum(2), 1, atol=1e-5)
    np.testing.assert_allclose(seen.mass[0, :, :, 0, 0], [[1 / 3, 0, 2 / 3]] * planted.SPEC.num_heads, atol=1e-5)
    assert (seen.mass[1, :, 0] > 0.99).all()
    np.testing.assert_allclose(seen.share[:, 0, 0], [1 / 3, 0, 2 / 3])
    assert (seen.added[0] == 0).all() and (seen.added[1] > 0.1).all()
    assert [weights.shape for _, weights in seen.examples] == [(2, planted.SPEC.num_heads, 3, 3)] * 2


def test_nothing_is_found_where_nothing_moves():
    walk = Walk(Model(planted.SPEC), {"backbone": planted.backbone(None), "adapters": {}})
    measured, found = analysed(walk, 8)
    assert (measured.distance == 0).all()
    marks = findings.landmarks(found)
    assert set(marks.values()) == {None}
    assert all(layer.effect["question"] is None for layer in found.layers), "a share of nothing has no meaning"
    assert all(layer.probe["answer"].value == 0.5 for layer in found.layers)
