"""Typed reading of a Hugging Face config.json, whose mistakes are the user's to mend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from calyrex_jax.core.errors import UserError

REQUIRED = object()


class Fields:
    """The fields of one JSON object, read by name and type; every complaint says where, what was got and what to do.

        >>> Fields({"vocab_size": 8}, "config.json").integer("vocab_size")
        8

    Raises UserError on a missing required field or a value of another type.
    """

    def __init__(self, values: Any, where: str):
        if not isinstance(values, dict):
            raise UserError(f"{where}: expected a JSON object, got {type(values).__name__}; give the model's config.json")
        self.values, self.where = values, where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def _read(self, name: str, default: Any, types: tuple[type, ...], expected: str) -> Any:
        if not self.has(name):
            if default is REQUIRED:
                raise UserError(
                    f"{self.where}: {name} is missing; expected {expected}; take the config.json of the checkpoint"
                )
            return default
        value = self.values[name]
        # bool is a subclass of int, and "true" positions would otherwise pass as 1
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise UserError(f"{self.where}: {name} is {value!r}; expected {expected}; mend the field")
        return value

    def integer(self, name: str, default: Any = REQUIRED) -> Any:
        """A whole number of at least 1."""
        value = self._read(name, default, (int,), "a whole number of at least 1")
        if self.has(name) and value < 1:
            raise UserError(f"{self.where}: {name} is {value}; expected a whole number of at least 1; mend the field")
        return value

    def number(self, name: str, default: Any = REQUIRED, least: float = 0.0) -> Any:
        """A finite number above `least`."""
        value = self._read(name, default, (int, float), f"a number above {least:g}")
        if not self.has(name):
            return value
        if not least < value < float("inf"):
            raise UserError(f"{self.where}: {name} is {value}; expected a finite number above {least:g}; mend the field")
        return float(value)

    def flag(self, name: str, default: Any = REQUIRED) -> Any:
        """true or false."""
        return self._read(name, default, (bool,), "true or false")

    def choice(self, name: str, known: Sequence[str], default: Any = REQUIRED) -> Any:
        """One of the `known` words."""
        value = self._read(name, default, (str,), f"one of {', '.join(known)}")
        if value is not None and value not in known:
            raise UserError(f"{self.where}: {name} {value!r} is not supported; known: {', '.join(known)}")
        return value

    def refuse_unless(self, name: str, harmless: Sequence[Any], why: str) -> None:
        """An error where the field holds anything but null or a harmless value."""
        if self.has(name) and self.values[name] not in harmless:
            raise UserError(
                f"{self.where}: {name} is {self.values[name]!r}, which is not supported: {why}; "
                f"expected {' or '.join(map(repr, (*harmless, None)))}"
            )
