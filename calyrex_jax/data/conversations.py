"""Rows of foreign data sets as conversations: `messages`, or ShareGPT's `conversations` with from and value."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.account import Account
from calyrex_jax.data.validate import validate

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # a reply that is a call, written as text
    "observation": "tool",
    "function_response": "tool",
}


def as_conversation(row: dict[str, Any], where: str) -> dict[str, Any]:
    """`{"messages": [{"role", "content"}, …], "distill": bool}`, checked by `validate`; other columns are left out.

        as_conversation({"conversations": [{"from": "human", "value": "Hi"}]}, "f:1")

    The turns stand in a column `messages` or `conversations`, with role and content or from and value; a text in a column
    `system` (or `system_prompt`) is put before them where they hold no system message. Raises UserError with `where` for
    a row without turns, and for what `validate` refuses.
    """
    turns = next((row[name] for name in ("messages", "conversations") if row.get(name) is not None), None)
    if isinstance(turns, dict) and all(isinstance(column, list) for column in turns.values()):  # as TFDS has sequences
        turns = [dict(zip(turns, values)) for values in zip(*turns.values())]
    if turns is None:
        raise UserError(f'{where}: without "messages" or "conversations"; name the column of turns so')
    if not isinstance(turns, list):
        raise UserError(f"{where}: turns are {type(turns).__name__}, expected a list")
    messages = [_message(turn) for turn in turns]
    system = row.get("system") or row.get("system_prompt")
    has_system = any(isinstance(message, dict) and message["role"] == "system" for message in messages)
    if isinstance(system, str) and system.strip() and not has_system:
        messages.insert(0, {"role": "system", "content": system})
    distill = row.get("distill")
    conversation = {"messages": messages, "distill": False if distill is None else distill}
    return conversation | {"messages": validate(conversation, where)}


def _message(turn: Any) -> Any:
    """One turn as `validate` takes it; what is no turn is left for it to refuse."""
    if not isinstance(turn, dict):
        return turn
    role, content = (
        next((turn[name] for name in names if turn.get(name) is not None), None)
        for names in (("role", "from"), ("content", "value"))
    )
    calls = {name: turn[name] for name in ("tool_calls", "function_call") if turn.get(name)}
    return {"role": ROLES.get(role, role) if isinstance(role, str) else role, "content": content} | calls


def sift(rows: Iterable[tuple[str, dict[str, Any]]], account: Account) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows that are conversations; the others are counted in `account` by what is wrong with them."""
    for where, row in rows:
        account.read += 1
        try:
            conversation = as_conversation(row, where)
        except UserError as error:
            account.drop(reason(str(error), where), where)
        else:
            account.kept += 1
            yield where, conversation


def reason(fault: str, where: str) -> str:
    """A fault without its place and remedy, so that like ones are counted together.

    >>> reason("f:1: messages[3] (role 'user') has null content, expected a text", "f:1")
    "with a message that has null content"
    """
    said = re.split(r"; |, expected ", fault.removeprefix(f"{where}: "))[0]
    said = re.sub(r" \(role '\w*'\)", "", said)
    if (message := re.match(r"messages\[\d+\] ", said)) is not None:
        return f"with a message that {said[message.end() :]}"
    return said if said.startswith("without") else f"refused as {said}"
