"""Tokenizers from directories and GGUF files: ids, stop ids, entries, refusals."""

import json
import struct
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import gguf_tokenizer
from calyrex_jax.data.chat import encode
from calyrex_jax.data.template import ChatTemplate
from calyrex_jax.data.tokenizer import load_tokenizer
from tests.data.conftest import CHATML, MISTRAL, TEXTS, cached, train_byte_level, train_sentencepiece, write_gguf
from tests.data.reference import byte_alphabet

GPT2_SPLIT = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def plain_bpe(text: str, fields: dict) -> list[int]:
    """SmolLM2's tokenizer written out: single digits, GPT-2's words, bytes, merges by rank."""
    rank = {tuple(merge.split(" ")): i for i, merge in enumerate(fields["tokenizer.ggml.merges"])}
    ids = {token: i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    alphabet = byte_alphabet()
    out = []
    for stretch in regex.findall(r"\p{N}|\P{N}+", text):
        for word in GPT2_SPLIT.findall(stretch):
            pieces = [alphabet[byte] for byte in word.encode()]
            while len(pieces) > 1:
                best = min(pairwise(pieces), key=lambda pair: rank.get(pair, 1 << 30))
                if best not in rank:
                    break
                at = next(i for i, pair in enumerate(pairwise(pieces)) if pair == best)
                pieces[at : at + 2] = ["".join(best)]
            out += [ids[piece] for piece in pieces]
    return out


def greedy_sentencepiece(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Sentencepiece's BPE written out: the adjacent pair whose joint piece scores best (here: smallest id) goes first."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(vocabulary[a + b], i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in vocabulary]
        if not joins:
            break
        _, at = min(joins)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out = []
    for piece in pieces:
        out += [vocabulary[piece]] if piece in vocabulary else [vocabulary[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


def test_smollm2_from_gguf(real, smollm2_source):
    tokenizer = real("smollm2")
    assert tokenizer.vocab_size == 49152 and tokenizer.has_entry.all()
    assert tokenizer.stop_ids == {2} and tokenizer.pad_id == 2
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n")[0] == 1
    fields = gguf_tokenizer.read_fields(smollm2_source.path)
    for text in TEXTS:
        assert tokenizer.encode(text) == plain_bpe(text, fields), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_fields_equal_the_gguf_packages(tmp_path):
    from gguf import GGUFReader

    path = write_gguf(
        tmp_path / "t.gguf", train_byte_level(), "gpt2", tokenizer_pre="gpt-2", rope_freq_base=1e4, vocab_size=7
    )
    mine = gguf_tokenizer.read_fields(path)
    theirs = {name: field.contents() for name, field in GGUFReader(path).fields.items() if not name.startswith("GGUF.")}
    assert mine == theirs and mine["llama.rope.freq_base"] == 1e4


@pytest.mark.parametrize(
    ("name", "pre", "end", "turn"), [("llama3_1", "llama-bpe", 128001, 128009), ("qwen2_5", "qwen2", 151643, 151645)]
)
def test_gguf_equals_tokenizer_json(name, pre, end, turn, tmp_path, real):
    original = Tokenizer.from_file(str(cached(name) / "tokenizer.json"))
    fields = {"tokenizer_pre": pre, "eos_token_id": end, "eot_token_id": turn, "chat_template": "{{ x }}"}
    path = write_gguf(tmp_path / "t.gguf", original, "gpt2", **fields)
    built = load_tokenizer(path, "gguf", {}, {})
    assert built.vocab_size == real(name).vocab_size  # without the fillers
    assert built.declared_stop == {end, turn} and built.chat_template == "{{ x }}"
    for text in [*TEXTS, "<|im_start|><|eot_id|>x<|im_end|> <tool_call>"]:
        expected = original.encode(text, add_special_tokens=False)
        assert built.encode(text) == expected.ids, text
        assert built.decode(expected.ids, False) == original.decode(expected.ids, skip_special_tokens=False)
    ids, offsets = built.encode_offsets(TEXTS)[0]
    assert ids.dtype == np.int32 and TEXTS[0][slice(*offsets[1])] == ","


def test_sentencepiece_from_gguf(tmp_path):
    original = train_sentencepiece()
    tokenizer = load_tokenizer(
        write_gguf(tmp_path / "t.gguf", original, "llama", bos_token_id=1, eos_token_id=2), "gguf", {}, {}
    )
    vocabulary = original.get_vocab()
    for text in TEXTS:
        assert tokenizer.encode(text) == greedy_sentencepiece(text, vocabulary), text
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("</s>") == [2] and tokenizer.fast.bos_token == "<s>" and tokenizer.stop_ids == {2}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda d: b"nope" + d[4:], "not a GGUF file"),
        (lambda d: d[: len(d) // 2], "broken or truncated"),
        (lambda d: d[:20], "broken or truncated"),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], "GGUF version 1"),
        (lambda d: d[:4] + d[4:8][::-1] + d[8:], "known are 2 and 3"),
        (lambda d: d.replace(b"smollm", b"doesnt"), "pre-tokenizer 'doesnt'"),
        (lambda d: d.replace(b"gpt2", b"bert"), "tokenizer model 'bert'"),
        (lambda d: d.replace(b"ggml.tokens", b"ggml.tokenz"), "no tokenizer in the file"),
        (lambda d: b"", "broken or truncated"),
    ],
)
def test_bad_gguf(damage, fault, tmp_path):
    path = write_gguf(tmp_path / "t.gguf", train_byte_level(), "gpt2", tokenizer_pre="smollm")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=fault):
        load_tokenizer(path, "gguf", {}, {})


def test_absent_gguf(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        load_tokenizer(tmp_path / "none.gguf", "gguf", {}, {})


def test_stop_ids_are_a_union(tiny):
    tokenizer = tiny(CHATML, generation_config={"eos_token_id": [7, 8]})
    end = tokenizer.encode("<|im_end|>")
    assert len(end) == 1
    assert tokenizer.stop_ids == {7, 8, 2, end[0]}  # generation config, tokenizer's </s>, template
    assert tiny(MISTRAL).stop_ids == {2}
    assert tiny(None).stop_ids == {2}
    assert tiny("{{ raise_exception('never') }}").stop_ids == {2}
    with pytest.raises(UserError, match=r"eos_token_id is 'x', expected an id or a list of ids"):
        tiny(CHATML, generation_config={"eos_token_id": "x"})


def test_entries_and_padding(tiny):
    tokenizer = tiny(CHATML)
    assert tokenizer.vocab_size == tokenizer.has_entry.sum() == tokenizer.backend.get_vocab_size()
    assert tokenizer.pad_id == 2  # no pad token: any id will do
    assert tiny(CHATML, pad_token="<unk>").pad_id == 0
    ids = tokenizer.vocab_size
    assert tiny(CHATML, pad_token="<new>").pad_id == ids  # transformers gives it an id of its own
    fewer = tiny(CHATML, pad_token="<new>", rows=ids)
    assert fewer.pad_id == 2 and fewer.vocab_size == ids  # which has no row here
    assert tiny(CHATML, rows=ids + 100).vocab_size == ids
    with pytest.raises(UserError, match=r"f:1: token id \d+ is beyond the model's embedding of 5 rows"):
        encode(tiny(CHATML, rows=5), [{"role": "user", "content": "Hi"}], where="f:1")


def test_template_file_and_named_templates(tiny, tmp_path):
    original = tiny(CHATML)
    directory = tmp_path / "model"
    directory.mkdir()
    original.backend.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory, "directory", {}, {}).chat_template is None
    (directory / "chat_template.jinja").write_text(MISTRAL)
    assert load_tokenizer(directory, "directory", {}, {}).chat_template == MISTRAL
    (directory / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "{{ 1 }}"}, {"name": "default", "template": CHATML}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load_tokenizer(directory, "directory", {}, {}).chat_template == CHATML


def test_vocab_and_merges_files(tiny, tmp_path):
    """GPT-2's older layout, without tokenizer.json."""
    original = tiny(None)
    state = json.loads(original.backend.to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(state["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in state["model"]["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(tmp_path, "directory", {}, {})
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)


def test_truncation_padding_and_trimming_are_off(tiny, tmp_path):
    original = tiny(CHATML)
    state = json.loads(original.backend.to_str())
    state["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    state["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    state["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    state["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path, "directory", {}, {})
    text = "the quick brown fox jumps"
    [(ids, offsets)] = tokenizer.encode_offsets([text])
    assert list(ids) == original.encode(text)
    assert offsets[0, 0] == 0 and offsets[-1, 1] == len(text)
    assert (offsets[1:, 0] == offsets[:-1, 1]).all()  # every blank belongs to a token


def test_bad_directories(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_tokenizer(tmp_path / "none", "directory", {}, {})
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path, "directory", {}, {})
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(UserError, match="cannot be read") as error:
        load_tokenizer(tmp_path, "directory", {}, {})
    assert "\n" not in str(error.value)


def test_fingerprint(tiny):
    one, same, other, ends = tiny(CHATML), tiny(CHATML), tiny(MISTRAL), tiny(CHATML, generation_config={"eos_token_id": 9})
    assert one.fingerprint() == same.fingerprint()
    assert len({t.fingerprint() for t in (one, other, ends, tiny(CHATML, sentencepiece=True))}) == 4


@pytest.mark.parametrize("sentencepiece", [False, True])
def test_shield_changes_nothing_else(tiny, sentencepiece):
    """Without intruders the shielded ids and offsets equal the plain ones."""
    tokenizer = tiny(CHATML, sentencepiece)
    template: ChatTemplate = tokenizer.template(None, "")
    for text in TEXTS:
        text = f"<|im_start|> {text}<|im_end|>\n{text}</s>"
        [(ids, offsets)] = tokenizer.encode_offsets([text])
        places = [(at, at + len(token)) for at, token in template.gaps_special(text, [])]
        shielded, spots = tokenizer.encode_shielded(text, places, template)
        np.testing.assert_array_equal(shielded, ids)
        np.testing.assert_array_equal(spots, offsets)
        assert not np.isin(tokenizer.encode_shielded(text, [], template)[0], tokenizer.ids_of(template)).any()


def test_without_torch_nothing_is_said_on_import():
    """transformers would advise to install it, on standard error, in every run."""
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
sys.modules["torch"] = None  # an import of it fails
import calyrex_jax.data.tokenizer
from transformers.utils import is_torch_available
print(is_torch_available())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("False\n", "")
