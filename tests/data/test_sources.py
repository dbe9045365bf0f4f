"""Faults in JSON Lines files: each with its file and line."""

import json

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.sources import load_conversations, read_jsonl

GOOD = json.dumps({"messages": [{"role": "user", "content": "Hi 你好"}], "id": 1}).encode()


def write(tmp_path, data: bytes):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("data", [GOOD, GOOD + b"\n", b"\xef\xbb\xbf" + GOOD, GOOD + b"\r\n", b"\n \n" + GOOD + b"\n\n\n"])
def test_accepted(data, tmp_path):
    path = write(tmp_path, data)
    [(where, row)] = load_conversations(path)
    line = 3 if data.startswith(b"\n") else 1
    assert where == f"{path}:{line}" and row == json.loads(GOOD)  # other keys pass through


def test_characters_that_only_look_like_line_ends(tmp_path):
    text = "a\u2028b\u0085c\x0b"
    line = json.dumps({"t": text}, ensure_ascii=False).replace("\x0b", "\\u000b").encode()
    assert [row["t"] for _, row in read_jsonl(write(tmp_path, line + b"\n" + line))] == [text, text]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"a": "\xff"}', r"byte 8 of the line is not UTF-8 \(0xff\)"),
        (b'{"a": "\xe4\xbd', "byte 8 of the line is not UTF-8"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": [1, -Infinity]}', "-Infinity is not JSON"),
        (b'{"a": 1', "malformed JSON .* at column 8"),
        (b"{'a': 1}", "malformed JSON .* at column 2"),
        (b'{"a": 1} {"b": 2}', "malformed JSON .Extra data"),
        (b"\xef\xbb\xbf{}", "malformed JSON|cannot be read"),  # a mark only opens a file
        (b"[1]", "list, expected an object"),
        (b'"text"', "str, expected an object"),
        (b"null", "NoneType, expected an object"),
        (b'{"a": "\\ud83d"}', "half of a surrogate pair"),
        (b'{"a": ' + b"1" * 5000 + b"}", "cannot be read"),
        (b"[" * 100000, "cannot be read|malformed"),
        (b'{"a": 1}', 'no "messages"'),
        (b'{"messages": []}', '"messages" is empty'),
        (b'{"messages": [{"role": "user", "content": null}]}', r"messages\[0\] \(role 'user'\) has null content"),
    ],
)
def test_faults_name_file_and_line(line, fault, tmp_path):
    path = write(tmp_path, GOOD + b"\n\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError, match=rf"chats\.jsonl:3: .*({fault})") as error:
        load_conversations(path)
    assert "\n" not in str(error.value)


def test_whole_pairs_pass(tmp_path):
    [(_, row)] = read_jsonl(write(tmp_path, b'{"a": "\\ud83d\\ude00"}'))
    assert row == {"a": "😀"}


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf"])
def test_empty_files(data, tmp_path):
    with pytest.raises(UserError, match=r"chats\.jsonl: empty, at least one line"):
        read_jsonl(write(tmp_path, data))


def test_utf16(tmp_path):
    with pytest.raises(UserError, match=r"chats\.jsonl:1: UTF-16, expected UTF-8"):
        read_jsonl(write(tmp_path, GOOD.decode().encode("utf-16")))


def test_absent_files_and_directories(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(UserError, match="cannot be read"):
            read_jsonl(path)
