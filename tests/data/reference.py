"""What the tests hold encodings against: stock renderings, and masks found byte by byte."""

from itertools import pairwise

import numpy as np


def byte_alphabet() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(rest)}


def chat(*contents: str, system: str | None = None) -> list[dict[str, str]]:
    """user, assistant, user, … after an optional system message."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def rendered(tokenizer, messages, for_generation=False) -> str:
    """The stock rendering, by transformers."""
    return tokenizer.fast.apply_chat_template(
        messages, chat_template=tokenizer.chat_template, tokenize=False, add_generation_prompt=for_generation
    )


def token_bytes(tokenizer, ids) -> list[bytes]:
    """What each token of a byte-level tokenizer spells, from its name alone."""
    back = {char: byte for byte, char in byte_alphabet().items()}
    added = {i: text for text, i in tokenizer.added.items()}
    names = [added.get(int(i)) or tokenizer.backend.id_to_token(int(i)) for i in ids]
    return [name.encode() if int(i) in added else bytes(back[c] for c in name) for i, name in zip(ids, names)]


def covered(spelled: list[bytes], text: str, ranges: list[tuple[int, int]]) -> np.ndarray:
    """Which tokens hold a character of the ranges: the slow way, byte by byte."""
    assert b"".join(spelled) == text.encode()
    wanted = np.zeros(len(text.encode()), bool)
    for start, end in ranges:
        wanted[len(text[:start].encode()) : len(text[:end].encode())] = True
    edges = np.cumsum([0, *map(len, spelled)])
    return np.array([wanted[a:b].any() for a, b in pairwise(edges)])


def check(tokenizer, example, text, system, targets):
    """The example against the rendered text and its character ranges."""
    np.testing.assert_array_equal(example.tokens, tokenizer.encode(text))
    spelled = token_bytes(tokenizer, example.tokens)
    np.testing.assert_array_equal(example.system, covered(spelled, text, system))
    np.testing.assert_array_equal(example.targets, covered(spelled, text, targets))
