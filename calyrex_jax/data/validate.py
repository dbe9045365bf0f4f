"""What a conversation may look like, before any tokenizer sees it."""

from __future__ import annotations

from typing import Any

from calyrex_jax.core.errors import UserError

Message = dict[str, str]
ROLES = ("system", "user", "assistant", "tool")


def validate(conversation: dict[str, Any], where: str, for_generation: bool = False) -> list[Message]:
    """The conversation's messages as plain {"role", "content"}, or a UserError that names the first fault.

        validate({"messages": [{"role": "user", "content": "Hi"}]}, "chats.jsonl:1")

    Content must be a text; a list of {"type": "text", "text": …} parts is joined without a separator, as templates do.
    Apart from system messages (where these may stand is the policy's matter) the turns are user, assistant, user, …, a
    reply may be followed by tool messages, these by a reply. Empty texts are allowed. With `for_generation` the last turn
    must not be a reply. "distill", where given, is true or false.
    """
    if not isinstance(conversation.get("distill", False), bool):
        raise UserError(
            f'{where}: "distill" is {conversation["distill"]!r}, expected true (learn the frozen model\'s own predictions of '
            "the replies) or false (learn the replies)"
        )
    messages = conversation.get("messages")
    if messages is None:
        raise UserError(f'{where}: no "messages"; expected {{"messages": [{{"role": …, "content": …}}, …]}}')
    if not isinstance(messages, list) or not messages:
        raise UserError(
            f'{where}: "messages" is {"empty" if messages == [] else type(messages).__name__}, expected a list of messages'
        )
    plain = [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(messages)]
    previous = None
    for i, message in enumerate(plain):
        role = message["role"]
        if role != "system":
            _check_turn(previous, role, f"{where}: messages[{i}]")
            previous = role
    if previous is None:
        raise UserError(f"{where}: only system messages; add a user message")
    if for_generation and previous == "assistant":
        raise UserError(
            f"{where}: the last message is a reply, nothing is left to generate; end with a user or tool message"
        )
    return plain


def _message(message: Any, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f'{where} is {type(message).__name__}, expected an object {{"role": …, "content": …}}')
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise UserError(f"{where} has role {role!r}, expected one of {', '.join(ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise UserError(f"{where} has tool calls as objects, which are not supported; write the call as text in content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise UserError(f'{where} has content parts other than {{"type": "text", "text": …}}; only text is supported')
        content = "".join(p["text"] for p in content)
    if not isinstance(content, str):
        found = "null" if content is None else type(content).__name__
        raise UserError(
            f"{where} (role {role!r}) has {'no' if 'content' not in message else found} content, expected a text"
        )
    return {"role": role, "content": content}


def _check_turn(previous: str | None, role: str, where: str) -> None:
    allowed = {None: ("user",), "user": ("assistant",), "assistant": ("user", "tool"), "tool": ("assistant", "tool")}[
        previous
    ]
    if role not in allowed:
        place = (
            "opens the conversation"
            if previous is None
            else f"follows {'another' if previous == role else 'a message of'} role {previous!r}"
        )
        raise UserError(
            f"{where} has role {role!r} and {place}, expected {' or '.join(allowed)}; mend the order or join the texts"
        )
