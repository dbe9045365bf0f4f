"""Questions with known answers (assets/facts.jsonl) and the frozen model's own replies (assets/answers.jsonl, held_out.jsonl)."""

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ASSETS = Path(__file__).parent / "assets"

_TEST_FACTS = 0.25
# Kinds whose x is a word that is talked about, and so stands in quotation marks.
_QUOTED = ("opposite", "plural", "synonym")


@dataclass(frozen=True)
class Question:
    """One question, the answers that count, how many of them must appear, and its split.

        Question("capital:Peru/0", "What is the capital of Peru?", ("Lima",), 1, "train", "capital")

    All questions about one fact share a split, so that no held-out answer is seen in training.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    needed: int
    split: str
    kind: str

    @property
    def prompt(self) -> dict:
        """The bare question as a prompt: {"id": …, "messages": […]}."""
        messages = [{"role": "user", "content": self.text}]
        return {"id": prompt_id(self.id, messages), "messages": messages}


def prompt_id(name: str, messages: list[dict]) -> str:
    """A prompt's name and a digest of its messages, so that no reply serves another prompt: "capital:Peru/0#3f2a90bc"."""
    digest = hashlib.sha256(json.dumps(messages, sort_keys=True).encode("utf-8")).hexdigest()[:8]
    return f"{name}#{digest}"


def fraction(text: str) -> float:
    """A fixed pseudo-random number in [0, 1) for a text: `fraction("capital:Peru")`; the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:6], "big") / 2.0**48


def read_asset(name: str) -> Iterator[dict]:
    """The objects of one packaged JSON-lines file: `read_asset("facts.jsonl")`."""
    with (ASSETS / name).open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


@functools.cache
def questions() -> tuple[Question, ...]:
    """All questions, in a fixed order; about a quarter of the facts have split "test".

    questions()[0].text  # "What is the capital of Peru?"
    """
    found = []
    for kind in read_asset("facts.jsonl"):
        name = kind["kind"]
        for subject, *answers in kind["facts"]:
            # "hot" and "cold" are one fact, whichever is asked for.
            fact = "/".join(sorted((subject, answers[0]))) if name == "opposite" else subject
            split = "test" if fraction(f"{name}:{fact}") < _TEST_FACTS else "train"
            shown = f'"{subject}"' if name in _QUOTED else subject
            for number, template in enumerate(kind["templates"]):
                text = template.replace("{x}", shown)
                needed = 2 if name == "list" else 1
                found.append(Question(f"{name}:{subject}/{number}", text, tuple(answers), needed, split, name))
    return tuple(found)


@functools.cache
def frozen_replies() -> dict[str, str]:
    """Prompt id -> what the frozen model said to it (see rules_answers.py); of questions only what was found right."""
    return {row["id"]: row["reply"] for row in read_asset("answers.jsonl")}


@functools.cache
def held_out_replies() -> dict[str, str]:
    """The same of the held-out questions, for evaluation alone."""
    return {row["id"]: row["reply"] for row in read_asset("held_out.jsonl")}
