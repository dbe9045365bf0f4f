from dataclasses import replace

import jax
import numpy as np
import pytest

from calyrex_jax.adapters.svgt import check_layer, default_layer
from calyrex_jax.core.errors import UserError
from tests import tiny

SVGT = tiny.svgt(tiny.spec())


def test_parts_and_place():
    params = SVGT.init(jax.random.key(0))
    assert set(params) == {"value_space", "bridge"} and SVGT.boundary == SVGT.layer + 1 == 2
    states = np.ones((2, 4, 32), np.float32)
    z = jax.jit(SVGT.value_space.values)(params["value_space"], states, np.ones((2, 4), bool))
    tokens = SVGT.bridge.propose(params["bridge"], states[:, 0], z[:, -1])
    assert tokens.shape == (2, 3, 32)


@pytest.mark.parametrize(("layers", "expected"), [(12, 9), (20, 17), (24, 12), (28, 14), (30, 15), (32, 16), (4, 1), (2, 0)])
def test_default_layer(layers, expected):
    assert default_layer(layers) == expected
    check_layer(expected, layers)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (30, r"config\.svgt\.layer: layer 30 lies outside the backbone; its 30 layers are 0 to 29"),
        (-2, r"config\.svgt\.layer: layer -2 lies outside"),
        (29, r"config\.svgt\.layer: 29 is the last of 30 layers, so no layer is left to see the bridge; choose at most 28"),
    ],
)
def test_layers_that_cannot_be(layer, said):
    with pytest.raises(UserError, match=said):
        check_layer(layer, 30)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"refresh_every": 0}, r"config\.svgt\.refresh_every: got 0, expected at least 1"),
        ({"momentum": 1.0}, r"config\.svgt\.momentum: got 1\.0, expected in \[0, 1\)"),
        ({"momentum": -0.1}, r"config\.svgt\.momentum: got -0\.1"),
        ({"layer": -1}, r"config\.svgt\.layer: layer -1 lies outside the backbone"),
    ],
)
def test_what_cannot_be(changes, said):
    with pytest.raises(UserError, match=said):
        replace(SVGT, **changes)


def test_both_parts_have_one_width():
    with pytest.raises(ValueError, match="value_dim of the value space is 12, of the bridge 6"):
        replace(SVGT, bridge_config=replace(SVGT.bridge_config, value_dim=6))
