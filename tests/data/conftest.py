"""Tokenizers for these tests: the real ones from the cache, and small ones trained here."""

import json
import os
from pathlib import Path

import pytest
from gguf import GGUFWriter
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from calyrex_jax.data.tokenizer import load_tokenizer

TEXTS = [
    "Hello, world! It's 12345 o'clock; isn't it?  Two  blanks\n\n\ta tab\r\n",
    "Answer in German: Fünf größere Füchse äßen süße Brötchen.",
    "你好，世界。請用中文回答 2024年10月3日",
    "Ответь по-русски: сколько будет 7×8?",
    "ก็ไม่รู้เหมือนกัน أجب بالعربية हिन्दी में उत्तर दें",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽 🤷‍♂️ emoji",
    "e\u0301 n\u0303 combining Z\u0351\u0300algo \u1e9b\u0323",
    "def f(x):\n    return {'a': x**2}  # comment\n",
    "\u00a0no-break\u2009thin\u3000wide \ufeff mark\u200b",
    "MiXeD CaSe WORDS'LL and 'Re 'VE",
    "   leading and trailing   ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 Ⅷ ½ ² ٣",
]
# A little of everything, so that small vocabularies learn merges.
TRAINING = (
    TEXTS * 3
    + ["the quick brown fox jumps over the lazy dog", "answer every question in one word", "user assistant system"] * 20
)

MISTRAL = (  # as Mistral-7B-Instruct-v0.1's: no system role, strict turns, no blank after a reply
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
GEMMA = (  # as Gemma-2's: refuses a system role, trims, calls the assistant "model"
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>"]


def train_byte_level() -> Tokenizer:
    """A byte-level BPE of some 900 entries."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    return tokenizer


def train_sentencepiece() -> Tokenizer:
    """A BPE in the manner of sentencepiece, as Llama-2's and Mistral's: "▁" for blanks, bytes for unseen characters."""
    plain = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    text = [t for t in TRAINING if t.isascii()]
    plain.train_from_iterator(text, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    state = json.loads(plain.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(template, sentencepiece=False, **config): a small tokenizer from a directory as Hugging Face has it."""
    trained = {False: train_byte_level(), True: train_sentencepiece()}

    def make(
        template: str | None,
        sentencepiece: bool = False,
        generation_config: dict | None = None,
        rows: int | None = None,
        **config,
    ):
        directory = tmp_path_factory.mktemp("tiny")
        trained[sentencepiece].save(str(directory / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        }
        if template is not None:
            settings["chat_template"] = template
        (directory / "tokenizer_config.json").write_text(json.dumps({**settings, **config}))
        return load_tokenizer(directory, "directory", generation_config or {}, {} if rows is None else {"vocab_size": rows})

    return make


def cached(name: str) -> Path:
    """The directory of a real tokenizer; skips where `tests/fetch_tokenizers.sh` has not been run."""
    directory = Path(os.environ.get("CALYREX_CACHE") or Path.home() / ".cache/calyrex_jax") / "tokenizers" / name
    if not (directory / "tokenizer.json").exists():
        pytest.skip(f"no {name} tokenizer in the cache; run `bash tests/fetch_tokenizers.sh`")
    return directory


@pytest.fixture(scope="session")
def real(request):
    """real("smollm2" | "llama3_1" | "qwen2_5"): a real model's tokenizer."""
    loaded = {}

    def load(name: str):
        if name not in loaded and name == "smollm2":
            source = request.getfixturevalue("smollm2_source")
            loaded[name] = load_tokenizer(source.path, "gguf", {}, {})
        elif name not in loaded:
            loaded[name] = load_tokenizer(cached(name), "directory", {}, {})
        return loaded[name]

    return load


def write_gguf(path: Path, tokenizer: Tokenizer, model: str, **fields) -> Path:
    """A GGUF file without tensors that holds the tokenizer's fields as llama.cpp's converter writes them."""
    writer = GGUFWriter(path, "llama")
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    kinds = [1 if i not in added else 3 if added[i].special else 4 for _, i in vocabulary]
    tokens = [text for text, _ in vocabulary]
    if model == "llama":
        kinds = [2 if text == "<unk>" else 6 if text.startswith("<0x") else kind for text, kind in zip(tokens, kinds)]
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_tokenizer_model(model)
    writer.add_token_list([*tokens, "[PAD0]", "[PAD1]"])  # fillers up to the embedding's rows
    writer.add_token_types([*kinds, 5, 5])
    if model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]])
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
