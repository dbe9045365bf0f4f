"""A fast tokenizer from the fields of a GGUF file.

The file is read by hand and only up to its tensors: the `gguf` package makes a numpy view of every string of the
vocabulary and takes seconds for what takes a tenth of one here. Format: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from calyrex_jax.core.errors import UserError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_UNKNOWN, _CONTROL, _USER, _UNUSED = 2, 3, 4, 5  # the values of tokenizer.ggml.token_type that matter here

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_KINDS = {
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
    "llama-bpe": "llama-bpe",
    "llama3": "llama-bpe",
}


class _Cursor:
    """A position in the mapped file; every read moves it."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, code: str, count: int = 1) -> tuple:
        size = struct.calcsize(code) * count
        values = struct.unpack_from(f"<{count}{code}", self.data, self.at)
        self.at += size
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        if self.at + length > len(self.data):
            raise struct.error("string runs past the end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, count = *self.take("I"), *self.take("Q")
            if inner in _SCALARS:
                return list(self.take(_SCALARS[inner], count))
            return [self.value(inner) for _ in range(count)]
        return self.take(_SCALARS[kind])[0]


def read_fields(path: Path | str) -> dict[str, Any]:
    """All key-value fields of a GGUF file as plain Python values; tensors are not touched.

        read_fields("SmolLM2.gguf")["tokenizer.ggml.pre"]      # 'smollm'

    Raises UserError where the file is absent, cut short, or not GGUF version 2 or 3.
    """
    path = Path(path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise UserError(
                    f"{path}: not a GGUF file (it starts with {data[:4]!r}); name a .gguf file of version 2 or 3"
                )
            cursor = _Cursor(data)
            cursor.at = 4
            (version,) = cursor.take("I")
            if version not in (2, 3):
                raise UserError(f"{path}: GGUF version {version}, known are 2 and 3 (little-endian); convert the file anew")
            _, fields = cursor.take("Q", 2)
            return {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(fields)}
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); name an existing .gguf file") from error
    except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path}: broken or truncated GGUF header ({error}); fetch the file again") from error


def build_tokenizer(fields: dict[str, Any], where: str) -> Tokenizer:
    """The `tokenizers` tokenizer that the fields describe, with the ids of the original.

    Known: `gpt2`-style byte-level BPE with the pre-tokenizers gpt-2, smollm, qwen2 and llama-bpe, and `llama`-style
    (sentencepiece) BPE with byte fallback. Anything else is a UserError that lists these.
    """
    if "tokenizer.ggml.tokens" not in fields:
        raise UserError(f"{where}: no tokenizer in the file (field tokenizer.ggml.tokens); use a GGUF file that carries one")
    kind = fields.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(fields, where)
    elif kind == "llama":
        tokenizer = _sentencepiece(fields, where)
    else:
        raise UserError(
            f"{where}: tokenizer model {kind!r} is not supported; known are 'gpt2', 'llama'; use the Hugging Face directory"
        )
    _add_special(tokenizer, fields)
    return tokenizer


def special_tokens(fields: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": text, …} for those of bos, eos, unk and pad that the file names."""
    tokens = fields["tokenizer.ggml.tokens"]
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{field}_token_id") for name, field in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _vocabulary(fields: dict[str, Any]) -> tuple[dict[str, int], list[int]]:
    """{text: id} without the filler rows that only pad the embedding, and the type of every id."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    return {text: i for i, (text, kind) in enumerate(zip(tokens, kinds)) if kind != _UNUSED}, kinds


def _byte_level(fields: dict[str, Any], where: str) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre") or ("gpt-2" if fields.get("general.architecture") == "gpt2" else None)
    if pre not in _KINDS:
        raise UserError(
            f"{where}: pre-tokenizer {pre!r} (field tokenizer.ggml.pre) is not supported; "
            f"known are {', '.join(sorted(_KINDS))}; use the Hugging Face directory"
        )
    pre = _KINDS[pre]
    vocabulary, _ = _vocabulary(fields)
    # a merge is "left right"; neither half of a byte-level piece holds a space
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    # Llama-3 lists whole words in its vocabulary that its merges alone do not reach
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    split = {"qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}.get(pre)
    if split:
        words: list = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    else:
        words = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=split is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: dict[str, Any], where: str) -> Tokenizer:
    if "tokenizer.ggml.scores" not in fields:
        raise UserError(
            f"{where}: sentencepiece without scores (field tokenizer.ggml.scores); use the Hugging Face directory"
        )
    vocabulary, kinds = _vocabulary(fields)
    scores = fields["tokenizer.ggml.scores"]
    plain = {text: i for text, i in vocabulary.items() if kinds[i] not in (_UNKNOWN, _CONTROL)}
    unknown = next((text for text, i in vocabulary.items() if kinds[i] == _UNKNOWN), None)
    bpe = models.BPE(vocab=vocabulary, merges=_merges(plain, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return tokenizer


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score first: sentencepiece's greedy order as a merge list."""
    found = []
    for piece, i in vocabulary.items():
        halves = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        found += [(scores[i], left, right) for left, right in known]
    found.sort(key=lambda entry: -entry[0])  # stable: ways to the same piece stay in the order of their halves
    return [(left, right) for _, left, right in found]


def _add_special(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    _, kinds = _vocabulary(fields)
    chosen = set(special_tokens(fields).values())
    added = []
    for text, kind in zip(tokens, kinds):
        if kind in (_UNKNOWN, _CONTROL) or text in chosen:
            added.append(AddedToken(text, special=True, normalized=False))
        elif kind == _USER:
            added.append(AddedToken(text, special=False, normalized=False))
    tokenizer.add_tokens(added)
