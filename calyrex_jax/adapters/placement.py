"""Where adapter blocks sit: a preset's name or explicit boundaries, for any depth."""

from __future__ import annotations

from math import ceil

from calyrex_jax.core.errors import UserError

PRESETS = ("every", "every2", "every4", "early8th", "mid8th", "late4th", "late8th", "last")


def boundaries(placement: str, num_layers: int) -> tuple[int, ...]:
    """The boundaries of a placement, ascending (CALYREX §3; the presets beyond late8th are this project's reading).

    >>> boundaries("late8th", 28)
    (24, 25, 26, 27, 28)
    >>> boundaries("26,28", 28)
    (26, 28)

    Raises UserError where the name is unknown or a boundary lies outside 0…num_layers or is named twice.
    """
    text = placement.strip()
    eighth = ceil(num_layers / 8)
    middle = num_layers // 2 - eighth // 2
    presets = {
        "every": range(1, num_layers + 1),
        "every2": range(2, num_layers + 1, 2),
        "every4": range(4, num_layers + 1, 4),
        "early8th": range(0, eighth + 1),
        "mid8th": range(middle, middle + eighth + 1),
        "late4th": range(num_layers - ceil(num_layers / 4), num_layers + 1),
        "late8th": range(num_layers - eighth, num_layers + 1),
        "last": range(num_layers, num_layers + 1),
    }
    if text in presets:
        found = tuple(presets[text])
        if not found:
            raise UserError(
                f"adapter.placement: {text!r} has no boundary in a backbone of {num_layers} layers; "
                f"name boundaries such as '{num_layers}'"
            )
        return found
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(
            f"adapter.placement: {placement!r} is neither a preset nor a list of boundaries; "
            f"use one of {', '.join(PRESETS)}, or boundaries such as '{num_layers - 2},{num_layers}'"
        ) from None
    outside = [b for b in found if not 0 <= b <= num_layers]
    if outside:
        raise UserError(
            f"adapter.placement: boundary {outside[0]} lies outside the backbone; boundaries run from 0 (before the "
            f"first layer) to {num_layers} (after the last)"
        )
    if len(set(found)) != len(found):
        raise UserError(f"adapter.placement: {placement!r} names a boundary twice; name each once")
    return tuple(sorted(found))
