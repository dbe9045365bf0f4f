"""A model's tokenizer, from a Hugging Face directory or a GGUF file, without torch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from calyrex_jax.core.errors import UserError
from calyrex_jax.data import gguf_tokenizer
from calyrex_jax.data.template import PLAIN, ChatTemplate, Range, TemplateRefusal
from calyrex_jax.data.validate import Message

# on import, transformers advises to install torch, which nothing here needs; a user's own setting is kept
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers import AutoTokenizer, PreTrainedTokenizerFast

_SENTINELS = 0xF8000  # private-use characters that stand in for special tokens while contents are kept plain

Shield = tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]


@dataclass
class Tokenizer:
    """Text to ids and back, with the chat template and the ids that end a reply.

        tokenizer = load_tokenizer(Path("model"), "directory", generation_config, config)
        tokenizer.decode(tokenizer.encode("Hello"))      # 'Hello'

    name           where it came from, for messages
    fast           the transformers tokenizer; its post-processor is removed: nothing here ever adds special tokens
    chat_template  the Jinja text that came with the model, or None
    declared_stop  ids that config, generation config and tokenizer name as ends
    rows           rows of the model's embedding, where the config says so
    """

    name: str
    fast: PreTrainedTokenizerFast
    chat_template: str | None
    declared_stop: frozenset[int]
    rows: int | None = None
    _templates: dict[tuple[str, str], ChatTemplate] = field(default_factory=dict, repr=False)
    _special_ids: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict, repr=False)
    _shields: dict[tuple[str, ...], Shield] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        # post-processors add special tokens and trim blanks from offsets; truncation and padding would cut and fill
        self.backend.post_processor = None
        self.backend.no_truncation()
        self.backend.no_padding()

    @property
    def backend(self) -> tokenizers.Tokenizer:
        return self.fast.backend_tokenizer

    @cached_property
    def added(self) -> dict[str, int]:
        """{text: id} of the added tokens, special or not."""
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def has_entry(self) -> np.ndarray:
        """[vocab_size] bool, true for ids with an entry; rows of the embedding beyond it have none, and never gain one."""
        ids = np.fromiter(self.backend.get_vocab(with_added_tokens=True).values(), np.int64)
        out = np.zeros(int(ids.max()) + 1, bool)
        out[ids] = True
        return out[: self.rows]

    @property
    def vocab_size(self) -> int:
        """One more than the largest id with an entry; the embedding may have more rows."""
        return len(self.has_entry)

    @property
    def pad_id(self) -> int:
        """An id to fill padding with. It may well be a real token's: padding is told by length, never by id."""
        for text in (self.fast.pad_token, self.fast.eos_token):
            found = None if text is None else self.backend.token_to_id(text)
            if found is not None and found < self.vocab_size:  # a pad token of the tokenizer's own may have no row
                return found
        return 0

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """Ids that end a reply: those of config, generation config and tokenizer, and the template's end-of-turn token."""
        return self.stop_ids_for(None)

    def stop_ids_for(self, template: ChatTemplate | None) -> frozenset[int]:
        """`stop_ids` with another template than the model's own."""
        if template is None and self.chat_template is not None:
            template = self.template(None, "")
        try:
            end = template.end_of_turn if template else None
        except TemplateRefusal:
            end = None  # a template that no plain conversation passes; encoding with it says so
        ids = self.encode(end) if end else []
        return self.declared_stop | (frozenset(ids) if len(ids) == 1 else frozenset())

    def template(self, override: str | None, date_string: str) -> ChatTemplate:
        """The model's own template, or `override`: Jinja text, or "plain" for a model without one.

        `date_string` is what the template sees as today's date, whatever the day, so that the same conversation always
        gives the same tokens. Raises UserError where there is no template.
        """
        source = PLAIN if override == "plain" else override if override is not None else self.chat_template
        if source is None:
            raise UserError(
                f"{self.name}: a base model without a chat template (neither chat_template.jinja nor a chat_template in its "
                'tokenizer config); name an instruct model, or set the chat template to "plain" or to a Jinja text'
            )
        if (source, date_string) not in self._templates:
            dated = _pin_clock(source, date_string)

            def render(messages: list[Message], for_generation: bool) -> str:
                return self.fast.apply_chat_template(
                    messages,
                    chat_template=dated,
                    tokenize=False,
                    add_generation_prompt=for_generation,
                    date_string=date_string,
                )

            # turn markers are special tokens, or in some conversions ordinary added tokens that the template writes out
            added = self.backend.get_added_tokens_decoder().values()
            markers = [token.content for token in added if token.special or token.content in source]
            self._templates[source, date_string] = ChatTemplate(render, markers, self.name)
        return self._templates[source, date_string]

    def ids_of(self, template: ChatTemplate) -> np.ndarray:
        """Ids of the tokens that only the template may write, int32."""
        if template.special not in self._special_ids:
            self._special_ids[template.special] = np.array([self.added[text] for text in template.special], np.int32)
        return self._special_ids[template.special]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; special tokens written in it are recognised, none is added."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """(ids [T] int32, offsets [T, 2] int32) a text; offsets count characters, and a token's blanks are its own."""
        found = self.backend.encode_batch(list(texts), add_special_tokens=False)
        return [(np.array(e.ids, np.int32), np.array(e.offsets, np.int32).reshape(-1, 2)) for e in found]

    def encode_shielded(self, text: str, special: Sequence[Range], template: ChatTemplate) -> tuple[np.ndarray, np.ndarray]:
        """As `encode_offsets` of one text, with the template's special tokens only at the ranges `special`, elsewhere plain.

        Each genuine special token is swapped for a run of one private-use character of the same length, which a copy of
        the tokenizer knows as an added token, and the copy is told to split off no special token. All else stays as it
        was, offsets too.
        """
        if template.special not in self._shields:
            self._shields[template.special] = _make_shield(self.backend, template.special)
        backend, sentinels, back = self._shields[template.special]
        if any(_SENTINELS <= ord(c) < _SENTINELS + len(sentinels) for c in text):
            raise UserError(f"{self.name}: a text has special tokens together with private-use characters; take these out")
        pieces, at = [], 0
        for start, end in special:
            pieces += [text[at:start], sentinels[text[start:end]]]
            at = end
        found = backend.encode("".join([*pieces, text[at:]]), add_special_tokens=False)
        ids = np.array([back.get(i, i) for i in found.ids], np.int32)
        return ids, np.array(found.offsets, np.int32).reshape(-1, 2)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of `ids`, without special tokens unless `skip_special` is false; blanks are left as they are."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def fingerprint(self) -> str:
        """SHA-256 over vocabulary, rules, chat template and stop ids: what decides how conversations become ids."""
        digest = hashlib.sha256(self.backend.to_str().encode())
        digest.update(
            json.dumps([self.chat_template, sorted(self.stop_ids), self.fast.special_tokens_map], default=str).encode()
        )
        return digest.hexdigest()


def load_tokenizer(path: Path, kind: str, generation_config: dict[str, Any], config: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a model: `kind` "directory" (tokenizer.json and its companions) or "gguf".

    `config` and `generation_config` are the model's, read for their `eos_token_id` (an id or a list; Llama-3 has
    several). Raises UserError where files are missing or broken.
    """
    path = Path(path)
    if kind == "gguf":
        fast, template, more = _from_gguf(path)
    elif kind == "directory":
        fast, template = _from_directory(path)
        more = []
    else:
        raise ValueError(f"kind {kind!r}, expected 'directory' or 'gguf'")
    stop = (
        set(more) | _eos_ids(config, f"{path}: config.json") | _eos_ids(generation_config, f"{path}: generation_config.json")
    )
    if fast.eos_token is not None:
        stop.add(fast.backend_tokenizer.token_to_id(fast.eos_token))
    return Tokenizer(
        name=str(path),
        fast=fast,
        chat_template=template,
        declared_stop=frozenset(stop - {None}),
        rows=config.get("vocab_size"),
    )


def _make_shield(original: tokenizers.Tokenizer, special: Sequence[str]) -> Shield:
    """A copy of the tokenizer that splits off none of `special`, {text: its stand-in}, {stand-in's id: special id}."""
    state = json.loads(original.to_str())
    for token in state["added_tokens"]:
        token["special"] = token["content"] in special  # `encode_special_tokens` goes by this flag
    backend = tokenizers.Tokenizer.from_str(json.dumps(state))
    backend.encode_special_tokens = True
    sentinels, stand_ins, back = {}, [], {}
    for i, token in original.get_added_tokens_decoder().items():
        if token.content in special:
            sentinel = chr(_SENTINELS + len(sentinels)) * len(token.content)
            sentinels[token.content] = sentinel
            flags = {"single_word": token.single_word, "lstrip": token.lstrip, "rstrip": token.rstrip}
            stand_ins.append(tokenizers.AddedToken(sentinel, normalized=False, special=False, **flags))
            back[sentinel] = i
    backend.add_tokens(stand_ins)
    return backend, sentinels, {backend.token_to_id(sentinel): i for sentinel, i in back.items()}


def _eos_ids(config: dict[str, Any], where: str) -> set[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise UserError(f"{where}: eos_token_id is {value!r}, expected an id or a list of ids; mend the file")
    return set(ids)


def _from_directory(path: Path) -> tuple[PreTrainedTokenizerFast, str | None]:
    if not path.is_dir():
        raise UserError(f"{path}: no such directory; name a model directory that holds tokenizer.json")
    legacy = (path / "tokenizer.model").exists() or ((path / "vocab.json").exists() and (path / "merges.txt").exists())
    # tokenizer.json is the published truth; the classes that transformers picks by name rebuild it from parts
    loader = PreTrainedTokenizerFast if (path / "tokenizer.json").exists() else AutoTokenizer if legacy else None
    if loader is None:
        raise UserError(
            f"{path}: no tokenizer.json (nor vocab.json with merges.txt, nor tokenizer.model); fetch these files too"
        )
    noisy = logging.getLogger("transformers.tokenization_utils_base")
    level = noisy.level
    noisy.setLevel(logging.ERROR)  # it warns that the class differs from the one named, which is meant
    try:
        fast = loader.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # the Rust side raises plain Exception for a broken file
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: the tokenizer files cannot be read ({said}); fetch them again") from error
    finally:
        noisy.setLevel(level)
    if not isinstance(fast, PreTrainedTokenizerFast):
        raise UserError(f"{path}: the tokenizer has no fast form, which character offsets need; add a tokenizer.json")
    template = fast.chat_template
    if isinstance(template, dict):  # several named templates: the one for plain chat
        template = template.get("default")
    return fast, template


def _from_gguf(path: Path) -> tuple[PreTrainedTokenizerFast, str | None, list[int]]:
    fields = gguf_tokenizer.read_fields(path)
    backend = gguf_tokenizer.build_tokenizer(fields, str(path))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **gguf_tokenizer.special_tokens(fields)
    )
    more = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eot", "eom")]
    return fast, fields.get("tokenizer.chat_template"), [i for i in more if i is not None]


def _pin_clock(source: str, date_string: str) -> str:
    """The template with its clock, `strftime_now`, stopped at `date_string`, written as it is whatever the format."""
    if "strftime_now" not in source:
        return source
    # the newline after a block is Jinja's (trim_blocks), so the template itself is unchanged, its first blanks included
    return "{% macro strftime_now(format) %}" + date_string + "{% endmacro %}\n" + source
