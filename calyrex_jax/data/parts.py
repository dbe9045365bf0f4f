"""Where a corpus comes from: `jsonl:FILE`, `tfds:DIR`, `hf:OWNER/NAME`, `rules`, and sums of these with weights.

parse_source("tfds:A*0.7 + jsonl:B.jsonl*0.3")   # (Part("tfds", "A", 0.7), Part("jsonl", "B.jsonl", 0.3))
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import records, rules
from calyrex_jax.data.account import Account
from calyrex_jax.data.conversations import sift
from calyrex_jax.data.rules_questions import ASSETS
from calyrex_jax.data.sources import iter_jsonl
from calyrex_jax.data.tables import data_files, iter_table
from calyrex_jax.data.validate import validate

KINDS = ("jsonl", "tfds", "hf", "rules")
FORMS = "FILE.jsonl, jsonl:FILE, tfds:DIR, hf:OWNER/NAME, hf:DIR, rules, or a sum such as 'tfds:A*0.7 + jsonl:B*0.3'"


@dataclass(frozen=True)
class Part:
    """One source of a corpus.

    kind    of KINDS
    where   the path or name
    weight  its share in a sum, None where the sum gives none
    size    conversations to generate, seed of the generator: rules only
    """

    kind: str
    where: str
    weight: float | None = None
    size: int = field(default=0, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    @property
    def name(self) -> str:
        """As a user writes it, without the weight."""
        return f"{self.kind}:{self.where}" if self.where else self.kind


def parse_source(text: str, *, size: int = 0, seed: int = 0, what: str = "config.data.source") -> tuple[Part, ...]:
    """The parts of a source, joined by " + ", each with "*WEIGHT" behind it or none of them.

    A path without a kind is a JSON Lines file, or Parquet where it ends so. Raises UserError, with `what`, for text that is
    empty or names another kind, and for weights that are not positive or given to some parts alone.
    """
    if not text.strip():
        raise UserError(f"{what} is empty; expected {FORMS}")
    parts = tuple(_part(piece.strip(), what) for piece in re.split(r"\s+\+(?:\s+|$)", text.strip()))
    weighted = [part for part in parts if part.weight is not None]
    if weighted and len(weighted) < len(parts):
        bare = next(part for part in parts if part.weight is None)
        raise UserError(f"{what}: {bare.name} has no weight but {weighted[0].name} has; give all of them one, or none")
    if any(part.kind == "rules" for part in parts) and size < 1:
        raise UserError(f"config.data.size is {size}; data.source=rules generates that many conversations; set 1 or more")
    return tuple(replace(part, size=size, seed=seed) if part.kind == "rules" else part for part in parts)


def _part(text: str, what: str) -> Part:
    weight = None
    if (match := re.fullmatch(r"(.*\S)\s*\*\s*(\S+)", text)) is not None and not Path(text).exists():
        text = match[1]
        try:
            weight = float(match[2])
        except ValueError:
            weight = math.nan
        if not (weight > 0 and math.isfinite(weight)):
            raise UserError(f"{what}: the weight of {text} is {match[2]}, expected a positive number, such as {text}*0.5")
    kind, colon, where = text.partition(":")
    if text == "rules":
        return Part("rules", "", weight)
    if colon and kind in KINDS and kind != "rules" and where:
        return Part(kind, where, weight)
    if not text or (colon and re.fullmatch(r"\w*", kind) and not Path(text).exists()):
        raise UserError(f"{what}: {text!r} is no source that is known; expected {FORMS}")
    return Part("hf" if text.lower().endswith(".parquet") else "jsonl", text, weight)


def files_of(part: Part) -> tuple[list[Path], list[str]]:
    """The files that a part is read from, and the names of those left out as held-out ones; rules has none.

    Raises UserError where they are absent.
    """
    if part.kind == "jsonl":
        path = Path(part.where).expanduser()
        if not path.is_file():
            next(iter_jsonl(path))  # raises what reading it raises
        return [path], []
    if part.kind == "tfds":
        root = records.find_records(part.where)
        return sorted(path for path in root.iterdir() if path.is_file() and path.name != "report.json"), []
    if part.kind == "hf":
        local = Path(part.where).expanduser().exists()
        return data_files(part.where if local else f"hf:{part.where}", part.name)
    return [], []


def read_part(part: Part, account: Account, strict: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, conversation) one by one, counted in `account`.

    JSON Lines are the user's own: their first fault raises UserError with file:line. Of data sets (tfds, hf), and without
    `strict` of all, rows that are no conversations are dropped and counted; a file that cannot be read always raises.
    """
    if part.kind == "rules":
        rows = ((f"rules:{number}", made) for number, made in enumerate(rules.training_set(seed=part.seed, size=part.size)))
    elif part.kind == "jsonl":
        rows = iter_jsonl(part.where)
    elif part.kind == "tfds":
        rows = records.read_records(part.where)
    else:
        rows = (row for file in files_of(part)[0] for row in iter_table(file))
    if not strict or part.kind in ("tfds", "hf"):
        yield from sift(rows, account)
        return
    for where, row in rows:
        validate(row, where)
        account.read += 1
        account.kept += 1
        yield where, row


def fingerprint(part: Part) -> str:
    """SHA-256 of what a part is read from: the files' names and bytes; of rules the generator and what it is asked for."""
    digest = hashlib.sha256(part.kind.encode())
    files = files_of(part)[0]
    if part.kind == "rules":
        digest.update(f"{part.seed} {part.size}".encode())
        files = sorted([*Path(rules.__file__).parent.glob("rules*.py"), *ASSETS.iterdir()])
    for path in files:
        digest.update((path.suffix if part.kind == "jsonl" else path.name).encode())
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror or error}); name a file that is whole") from None
    return digest.hexdigest()


def mix(counts: Sequence[int], weights: Sequence[float], seed: int) -> list[np.ndarray]:
    """Which examples of each part make an epoch: as many as all parts hold together, shared out by weight.

    A part with more than its share gives as many of its examples, drawn by `seed`; one with fewer gives all of them, again
    and again, and draws the rest. Every part gives one at least.

        >>> [len(part) for part in mix([10, 90], [0.7, 0.3], seed=0)]
        [70, 30]
    """
    total = sum(counts)
    exact = np.asarray(weights, float) / sum(weights) * total
    shares = np.maximum(np.floor(exact).astype(int), 1)
    for at in np.argsort(-(exact - np.floor(exact)), kind="stable")[: max(total - int(shares.sum()), 0)]:
        shares[at] += 1
    chosen = []
    for number, (count, share) in enumerate(zip(counts, shares)):
        whole, rest = divmod(int(share), int(count))
        drawn = np.random.default_rng([seed % 2**32, number]).permutation(count)[:rest]
        chosen.append(np.concatenate([np.tile(np.arange(count), whole), np.sort(drawn)]).astype(np.int64))
    return chosen
