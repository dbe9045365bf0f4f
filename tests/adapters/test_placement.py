import pytest

from calyrex_jax.adapters.placement import PRESETS, boundaries
from calyrex_jax.core.errors import UserError

# the published table (28: Qwen2.5-1.5B, 32: Llama-3.1-8B), and a depth that no eighth divides
TABLE = {
    ("every", 28): range(1, 29),
    ("every2", 28): range(2, 29, 2),
    ("every4", 28): (4, 8, 12, 16, 20, 24, 28),
    ("early8th", 28): (0, 1, 2, 3, 4),
    ("mid8th", 28): (12, 13, 14, 15, 16),
    ("late4th", 28): (21, 22, 23, 24, 25, 26, 27, 28),
    ("late8th", 28): (24, 25, 26, 27, 28),
    ("last", 28): (28,),
    ("every", 32): range(1, 33),
    ("every2", 32): range(2, 33, 2),
    ("every4", 32): (4, 8, 12, 16, 20, 24, 28, 32),
    ("early8th", 32): (0, 1, 2, 3, 4),
    ("mid8th", 32): (14, 15, 16, 17, 18),
    ("late4th", 32): (24, 25, 26, 27, 28, 29, 30, 31, 32),
    ("late8th", 32): (28, 29, 30, 31, 32),
    ("last", 32): (32,),
    ("every4", 30): (4, 8, 12, 16, 20, 24, 28),
    ("early8th", 30): (0, 1, 2, 3, 4),
    ("mid8th", 30): (13, 14, 15, 16, 17),
    ("late4th", 30): (22, 23, 24, 25, 26, 27, 28, 29, 30),
    ("late8th", 30): (26, 27, 28, 29, 30),
    ("late8th", 1): (0, 1),
    ("mid8th", 12): (5, 6, 7),
}


@pytest.mark.parametrize(("preset", "layers"), TABLE)
def test_presets(preset, layers):
    assert boundaries(preset, layers) == tuple(TABLE[preset, layers])


def test_the_table_covers_every_preset():
    assert {preset for preset, _ in TABLE} == set(PRESETS)


@pytest.mark.parametrize("layers", range(1, 40))
def test_presets_are_ascending_and_within_the_backbone(layers):
    for preset in PRESETS:
        if (preset, layers) in {("every2", 1), ("every4", 1), ("every4", 2), ("every4", 3)}:
            continue
        found = boundaries(preset, layers)
        assert list(found) == sorted(set(found)) and found[0] >= 0 and found[-1] <= layers


def test_explicit_boundaries():
    assert boundaries("26,28", 28) == (26, 28)
    assert boundaries(" 28, 0 ,3", 28) == (0, 3, 28)


@pytest.mark.parametrize(
    ("placement", "layers", "message"),
    [
        ("late9th", 28, "neither a preset nor a list"),
        ("", 28, "neither a preset nor a list"),
        ("26,", 28, "neither a preset nor a list"),
        ("2.5", 28, "neither a preset nor a list"),
        ("29", 28, "boundary 29 lies outside"),
        ("-1,28", 28, "boundary -1 lies outside"),
        ("26,26", 28, "twice"),
        ("every4", 3, "has no boundary"),
    ],
)
def test_mistakes_are_one_clear_line(placement, layers, message):
    with pytest.raises(UserError, match=message) as error:
        boundaries(placement, layers)
    assert "\n" not in str(error.value) and str(error.value).startswith("adapter.placement")
