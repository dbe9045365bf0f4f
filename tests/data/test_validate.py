"""Faults in conversations and policies, each named with its place."""

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.validate import validate
from tests.data.reference import chat


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        (None, 'no "messages"'),
        ([], '"messages" is empty'),
        ({"role": "user"}, '"messages" is dict'),
        (["hi"], r"messages\[0\] is str, expected an object"),
        (
            [{"role": "User", "content": "x"}],
            r"messages\[0\] has role 'User', expected one of system, user, assistant, tool",
        ),
        ([{"role": ["user"], "content": "x"}], r"messages\[0\] has role \['user'\]"),
        ([{"content": "x"}], r"messages\[0\] has role None"),
        ([{"role": "user", "content": None}], r"messages\[0\] \(role 'user'\) has null content, expected a text"),
        ([{"role": "user"}], r"messages\[0\] \(role 'user'\) has no content"),
        ([{"role": "user", "content": 3}], r"messages\[0\] \(role 'user'\) has int content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[0\] has content parts other than \{\"type\": \"text\"",
        ),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], r"messages\[0\] has content parts other than"),
        (chat("a") + chat("b"), r"messages\[1\] has role 'user' and follows another role 'user', expected assistant"),
        (chat("a", "b")[1:], r"messages\[0\] has role 'assistant' and opens the conversation, expected user"),
        (chat("a", "b") + chat("c", "d")[1:], r"messages\[2\] has role 'assistant' and follows another"),
        (
            chat("a") + [{"role": "tool", "content": "b"}],
            r"messages\[1\] has role 'tool' and follows a message of role 'user'",
        ),
        (chat(system="x"), "only system messages"),
        (chat("a") + [{"role": "assistant", "content": "", "tool_calls": [{}]}], r"messages\[1\] has tool calls"),
    ],
)
def test_validate(messages, fault):
    with pytest.raises(UserError, match=f"^chats.jsonl:7: {fault}") as error:
        validate({"messages": messages}, "chats.jsonl:7")
    assert "\n" not in str(error.value)


def test_validate_joins_text_parts_and_keeps_only_role_and_content():
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    got = validate({"messages": [{"role": "user", "content": parts, "name": "me"}], "id": 3}, "f:1")
    assert got == [{"role": "user", "content": "a b"}]
    tool = [*chat("q", "a"), {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, *chat("", "b")[1:]]
    assert validate({"messages": tool}, "f:1") == tool


def test_distill_is_true_or_false():
    talk = {"messages": chat("q", "a")}
    for value in (True, False):
        assert validate(talk | {"distill": value}, "f:1") == talk["messages"]
    with pytest.raises(UserError, match=r"^f:1: .distill. is 'yes', expected true"):
        validate(talk | {"distill": "yes"}, "f:1")


def test_policy_values():
    for field, value in [("system_role", "drop"), ("special_text", "yes"), ("chat_template", "chatml")]:
        with pytest.raises(UserError, match=f"{field} is '{value}', expected"):
            ChatPolicy(**{field: value})
