"""A labelled example, and the account of where a corpus of them comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from calyrex_jax.data.account import Account


@dataclass(frozen=True)
class Labelled:
    """One judgement.

    messages  the conversation up to the reply; () where there is only a text
    response  the text that the label is about: the reply, or the text
    label     1 harmful (a violation), 0 safe
    where     file:line
    """

    messages: tuple[dict, ...]
    response: str
    label: int
    where: str

    def __post_init__(self) -> None:
        if self.label not in (0, 1):
            raise ValueError(f"{self.where}: label {self.label!r}, expected 0 or 1")


@dataclass
class LabelledReport(Account):
    """`Account` of labelled examples: how many of the kept ones are harmful, and which files were read and left out."""

    harmful: int = 0
    files: Sequence[str] = field(default_factory=list)
    left_out: Sequence[str] = field(default_factory=list)

    def line(self) -> str:
        """One line for the user: `kept 8 of 10 examples (3 harmful); dropped 2 duplicates (f.jsonl:3, f.jsonl:9)`."""
        aside = [f"left out {', '.join(self.left_out)} (held-out files)"] if self.left_out else []
        return "; ".join([f"kept {self.kept} of {self.read} examples ({self.harmful} harmful)", *self.gone(), *aside])
