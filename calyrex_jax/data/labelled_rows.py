"""What the rows of each known data set say: a prompt, a response, and whether the response is harmful."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.validate import validate

Row = Mapping[str, Any]
_JIGSAW = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
_TRUE, _FALSE = ("1", "1.0", "true", "harmful", "unsafe", "toxic"), ("0", "0.0", "false", "unharmful", "safe", "benign")
_NULL = ("", "null", "none", "nan", "n/a", "-1")


class Judged(NamedTuple):
    """One row read: the prompt as messages (() for a text alone), the response, the label; None where the row has none."""

    messages: tuple[dict, ...]
    response: str | None
    label: bool | None


def own(row: Row, where: str) -> Judged:
    """{"text", "label"}, or {"response", "label"} with a "prompt" or "messages"; label 1 or true: harmful."""
    label = _flag(row, "label", where)
    if "text" in row:
        return Judged((), _text(row, "text", where), label)
    if "messages" in row:
        messages = tuple(validate(dict(row), where, for_generation=True))
    else:
        messages = _prompt(row, where)
    return Judged(messages, _text(row, "response", where), label)


def wildguardmix(row: Row, where: str) -> Judged:
    """prompt, response, response_harm_label: "harmful", "unharmful" or null; rows that judge a prompt alone have no response."""
    return Judged(_prompt(row, where), _text(row, "response", where), _flag(row, "response_harm_label", where))


def beavertails(row: Row, where: str) -> Judged:
    """prompt, response, is_safe; or without is_safe a category: an object of flags, harmful where any is true."""
    safe = _flag(row, "is_safe", where) if "is_safe" in row else None
    if safe is None and "category" in row:
        flags = row["category"]
        if flags is not None and not isinstance(flags, Mapping):
            _refuse(where, "category", flags, "an object of true and false")
        values = [_flag(flags, name, where) for name in flags or ()]
        label = None if not values or None in values else any(values)
    elif "is_safe" not in row:
        _refuse_missing(where, row, "is_safe or category")
    else:
        label = None if safe is None else not safe
    return Judged(_prompt(row, where), _text(row, "response", where), label)


def jigsaw(row: Row, where: str) -> Judged:
    """comment_text with six flags (harmful where any is 1; -1 means never judged), or with target, a share of judges (≥ 0.5)."""
    if "target" in row:
        share = _number(row, "target", where)
        label = None if share is None else share >= 0.5
    else:
        values = [_flag(row, name, where) for name in _JIGSAW]
        label = None if None in values else any(values)
    return Judged((), _text(row, "comment_text", where), label)


def toxigen(row: Row, where: str) -> Judged:
    """Judged texts (text, toxicity_ai, toxicity_human: harmful where they sum to more than 5.5, as the data set's authors
    have it), or generated ones (generation, prompt_label: 1 where the generator was asked for a harmful text). The raw
    annotations beside them, one row an annotator, have no label of their own."""
    if "Input.text" in row:
        return Judged((), _text(row, "Input.text", where), None)
    if "toxicity_human" in row:
        scores = [_number(row, name, where) for name in ("toxicity_ai", "toxicity_human")]
        label = None if None in scores else sum(scores) > 5.5  # type: ignore[arg-type]
        return Judged((), _text(row, "text", where), label)
    return Judged((), _text(row, "generation", where), _flag(row, "prompt_label", where))


SCHEMAS: dict[str, Callable[[Row, str], Judged]] = {
    "jsonl": own,
    "wildguardmix": wildguardmix,
    "beavertails": beavertails,
    "jigsaw": jigsaw,
    "toxigen": toxigen,
}


def _prompt(row: Row, where: str) -> tuple[dict, ...]:
    return ({"role": "user", "content": _text(row, "prompt", where) or ""},)


def _text(row: Row, name: str, where: str) -> str | None:
    value = _field(row, name, where)
    if value is not None and not isinstance(value, str):
        _refuse(where, name, value, "a text")
    return value


def _flag(row: Row, name: str, where: str) -> bool | None:
    """True, False, or None where the row leaves it open."""
    value = _field(row, name, where)
    text = "" if value is None else str(value).strip().lower()
    if text in _NULL:
        return None
    if text not in _TRUE + _FALSE:
        _refuse(where, name, value, "1 or 0, true or false, or null")
    return text in _TRUE


def _number(row: Row, name: str, where: str) -> float | None:
    value = _field(row, name, where)
    text = "" if value is None else str(value).strip().lower()
    if text in _NULL:
        return None
    try:
        return float(text)
    except ValueError:
        _refuse(where, name, value, "a number, or null")


def _field(row: Row, name: str, where: str) -> Any:
    if name not in row:
        _refuse_missing(where, row, name)
    return row[name]


def _refuse(where: str, name: str, value: Any, expected: str) -> NoReturn:
    raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}, expected {expected}; mend the row')


def _refuse_missing(where: str, row: Row, name: str) -> NoReturn:
    raise UserError(
        f'{where}: no "{name}", only {", ".join(map(str, row)) or "nothing"}; is this the right kind of data set?'
    )
