"""The collectives of a compiled program, read from its text: kind, shape, and how often each runs."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from math import prod

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.-]+) \(.*\) -> .* \{$")
_OPERATION = re.compile(rf"= \(?(\w+)\[([\d,]*)\].* ({'|'.join(KINDS)})(?:-start)?\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations|true_computation|false_computation)="
    r"(?:\{([^}]*)\}|(%?[\w.-]+))"
)
_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f8e4m3fn": 8, "f8e5m2": 8}


@dataclass(frozen=True)
class Collective:
    """One operation: what it leaves on a device, [shape] of dtype, and how often a run of the program does it."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    times: int

    @property
    def bytes(self) -> int:
        """Of its result on one device, all rounds together."""
        bits = _BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype) or 8)
        return prod(self.shape) * bits // 8 * self.times


def collectives(text: str) -> list[Collective]:
    """Every collective in the text of a compiled program (`compiled.as_text()`), the largest first.

    A loop's body counts as often as the loop runs, where its condition compares with a constant; otherwise once.
    The TPU compiler spreads one operation over several fused steps: these share a channel and count once.
    """
    bodies = _computations(text)
    rounds = _rounds(bodies)
    found: dict[tuple, Collective] = {}
    for name, lines in bodies.items():
        for line in lines:
            if (match := _OPERATION.search(line)) is None:
                continue
            channel = re.search(r"channel_id=(\d+)", line)
            shape = tuple(int(size) for size in match[2].split(",") if size)
            made = Collective(match[3], match[1], shape, rounds.get(name, 1))
            key = (match[3], channel[1]) if channel else (name, line)
            if key not in found or made.bytes > found[key].bytes:
                found[key] = made
    return sorted(found.values(), key=lambda one: -one.bytes)


def summary(found: list[Collective]) -> dict[str, dict[str, int]]:
    """{kind: {"count": operations, "runs": with loops, "bytes": left on a device a run of the program}}."""
    kinds: dict[str, dict[str, int]] = {}
    for one in found:
        entry = kinds.setdefault(one.kind, {"count": 0, "runs": 0, "bytes": 0})
        entry["count"] += 1
        entry["runs"] += one.times
        entry["bytes"] += one.bytes
    return kinds


def gathered_stacks(found: list[Collective], stacks: dict[str, tuple[int, ...]]) -> list[str]:
    """Which of `stacks` {name: whole shape} some all-gather leaves on a device in whole: none should be."""
    shapes = {one.shape for one in found if one.kind == "all-gather"}
    return [name for name, shape in stacks.items() if shape in shapes]


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in text.splitlines():
        if line.endswith("{") and (head := _HEAD.match(line)) is not None:
            current = bodies.setdefault(head[1], [])
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    return bodies


def _rounds(bodies: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: the product of the loops around it."""
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, lines in bodies.items():
        for line in lines:
            if "=" not in line:
                continue
            trips = _trips(line, bodies) if " while(" in line else 1
            for several, single in _CALLED.findall(line):
                for called in (several or single).split(","):
                    callers[called.strip().lstrip("%")].append((name, trips))
    memo: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in memo:
            memo[name] = 1  # an entry, and a guard against a circle
            memo[name] = max((of(caller) * trips for caller, trips in callers[name]), default=1)
        return memo[name]

    return {name: of(name) for name in bodies}


def _trips(line: str, bodies: dict[str, list[str]]) -> int:
    if (known := re.search(r'known_trip_count"?:\{"?n"?:"?(\d+)', line)) is not None:
        return int(known[1])
    condition = re.search(r"condition=%?([\w.-]+)", line)
    lines = bodies.get(condition[1], []) if condition else []
    constants = [int(n) for each in lines for n in re.findall(r"[su]32\[\][^ ]* constant\((\d+)\)", each)]
    return constants[0] if len(constants) == 1 else 1
