"""What became of a corpus' rows: how many were read and kept, how many dropped, by reason, with the first places."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields


@dataclass
class Account:
    """Rows read and kept, rows dropped by reason with the first five places of each."""

    read: int = 0
    kept: int = 0
    dropped: Counter = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)

    def drop(self, reason: str, where: str) -> None:
        """Counts one row that is left out: `drop("too long", "f.jsonl:3")`."""
        self.dropped[reason] += 1
        self.places.setdefault(reason, []).append(where)
        del self.places[reason][5:]

    def add(self, other: Account) -> None:
        """Counts what another account of the same kind has counted."""
        for item in fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if not isinstance(mine, dict):
                setattr(self, item.name, mine + theirs)
        self.dropped.update(other.dropped)
        for reason, places in other.places.items():
            self.places[reason] = (self.places.get(reason, []) + places)[:5]

    def gone(self) -> list[str]:
        """One phrase a reason: `["dropped 2 too long (f.jsonl:3, f.jsonl:9)"]`."""
        return [
            f"dropped {n} {reason} ({', '.join(self.places[reason])}{', …' if n > 5 else ''})"
            for reason, n in self.dropped.items()
        ]

    def line(self, what: str = "examples") -> str:
        """All of it in one line: "kept 3 of 5 examples; dropped 2 too long (f.jsonl:3, f.jsonl:9)"."""
        return "; ".join([f"kept {self.kept} of {self.read} {what}", *self.gone()])
