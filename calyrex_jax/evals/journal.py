"""Verdicts on disk, one JSON line each as soon as it is made, and what of an earlier run still holds.

    journal = Journal.open(path, model="9f3a…")          # lines of other models' states are let go
    missing = [item for item in items if journal.get(key(task, item)) is None]
    journal.add(key, item, verdict)

A verdict is kept by what it depends on: the task's settings, the item and the model. A line that a kill cut short is
dropped and made again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.report import write_text
from calyrex_jax.evals.tasks.api import Item, Score, Task, Verdict

VERSION = 1  # of what a verdict depends on beside the key's contents: raise it when a checker changes
# settings that choose among items and change none of them
_CHOOSING = frozenset({"limit", "far_limit"})


def verdict_key(task: Task, item: Item, model: str) -> str:
    """What a verdict depends on, as 16 hexadecimal digits; `model` is a digest of everything that makes replies."""
    settings = {f.name: getattr(task, f.name) for f in dataclasses.fields(task) if f.name not in _CHOOSING}
    content = [VERSION, task.name, settings, item.id, [dict(m) for m in item.messages], dict(item.detail), model]
    text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class Journal:
    """The lines of one task and model: {"key", "id", "scores", what the item is, what the model said}."""

    def __init__(self, path: Path, found: dict[str, Verdict]):
        self.path, self._found, self._file = path, found, None

    @classmethod
    def open(cls, path: Path, model: str) -> Journal:
        """What `path` holds of this state of the model; the rest of the file is removed. UserError where that fails."""
        lines, found = [], {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines(keepends=True):
            try:
                row = json.loads(line)
                kept = row["model"] == model and line.endswith("\n")
                verdict = Verdict(row["id"], tuple(_score(s) for s in row["scores"]), row["said"])
            except (ValueError, KeyError, TypeError):
                continue  # cut short by a kill
            if kept:
                lines.append(line)
                found[row["key"]] = verdict
        if text != "".join(lines):
            write_text(path, "".join(lines))
        return cls(path, found)

    def get(self, key: str) -> Verdict | None:
        """The verdict of an earlier run, or None."""
        return self._found.get(key)

    def add(self, key: str, model: str, item: Item, verdict: Verdict) -> None:
        """Writes a verdict at once."""
        row: dict[str, Any] = {"key": key, "model": model, "id": item.id}
        row |= {"scores": [[s.cell, _finite(s.total), s.count, s.kind] for s in verdict.scores]}
        row |= {"messages": [dict(m) for m in item.messages], "said": dict(verdict.said), "detail": dict(item.detail)}
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror or error}); free the disk or choose another --workdir"
            ) from error
        self._found[key] = verdict

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _score(row: list) -> Score:
    cell, total, count, kind = row
    return Score(cell, float(total), float(count), kind)


def _finite(total: float) -> float:
    """A score as JSON holds it; one that is not finite is a fault of the model's weights, told as such."""
    if not math.isfinite(total):
        raise UserError(f"eval: a score is {total}; the model's outputs are not finite, look at its checkpoint and dtype")
    return float(total)
