"""A training corpus: its parts read, encoded once and kept on disk, filtered by length, mixed by weight.

examples, report = load_corpus(tokenizer, policy, parse_source("tfds:A*0.7 + jsonl:B*0.3"), 1024, Path("run/tokens"))
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tokenizers
import transformers

from calyrex_jax.data import parts
from calyrex_jax.data.account import Account
from calyrex_jax.data.chat import (
    ChatPolicy,
    CorpusReport,
    Example,
    encode_stream,
    refuse_empty,
    refuse_endless,
    select,
)
from calyrex_jax.data.parts import Part
from calyrex_jax.data.token_store import TokenStore
from calyrex_jax.data.tokenizer import Tokenizer

VERSION = 1  # of what encoding makes of a conversation: raise it whenever that changes
_EVERY = 512  # conversations from one call of `advance` to the next


class Corpus(Sequence[Example]):
    """Chosen examples of several stores, one after the other; read from disk when they are asked for.

    lengths  [N] int64, tokens of each
    """

    def __init__(self, stores: Sequence[TokenStore], chosen: Sequence[np.ndarray]):
        self._stores = tuple(stores)
        self._which = np.repeat(np.arange(len(chosen)), [len(part) for part in chosen])
        self._index = np.concatenate(chosen)
        self.lengths = np.concatenate([store.lengths[part] for store, part in zip(stores, chosen)])

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Example:
        return self._stores[self._which[index]][self._index[index]]


def load_corpus(
    tokenizer: Tokenizer,
    policy: ChatPolicy,
    sources: Sequence[Part],
    max_length: int,
    token_dir: Path,
    seed: int = 0,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Corpus, CorpusReport]:
    """The examples to train on, and the account of what was read, kept, dropped and drawn.

    Conversations longer than `max_length` tokens and those without a reply are dropped; nothing is ever cut. With weights,
    `parts.mix` draws by `seed`. Each part is encoded once for a tokenizer, a chat policy and its content, under
    `token_dir`, whatever its weight and `max_length`. `advance` hears of every few hundred conversations that are encoded.
    Raises UserError for what cannot be read, and where nothing, or nothing of a weighted part, is left.
    """
    refuse_endless(tokenizer, policy)
    for part in sources:
        parts.files_of(part)  # what is absent shall be told before anything is encoded
    stores, kept, report = [], [], CorpusReport()
    for part in sources:
        store = encoded(tokenizer, policy, part, token_dir, advance)
        numbers, account = _usable(store, max_length)
        if part.weight is not None:
            refuse_empty(account, max_length, part.name)
        report.add(account)
        stores.append(store)
        kept.append(numbers)
    refuse_empty(report, max_length)
    if sources[0].weight is not None:
        drawn = parts.mix([len(numbers) for numbers in kept], [part.weight for part in sources], seed)
        report.drawn = [f"{len(d)} of {p.name} ({len(k)})" for d, k, p in zip(drawn, kept, sources)]
        kept = [numbers[part] for numbers, part in zip(kept, drawn)]
    return Corpus(stores, kept), report


def _usable(store: TokenStore, max_length: int) -> tuple[np.ndarray, CorpusReport]:
    """Numbers of a part's examples that can be trained on, and the account of its reading and of those left out."""
    read = store.account
    account = CorpusReport(read.read, 0, read.dropped.copy(), {reason: list(some) for reason, some in read.places.items()})
    targets, places = store.targets, functools.cache(store.places)  # a file that is read only where something is dropped
    numbers = select(store.lengths, targets, lambda i: places()[i], max_length, account)
    account.tokens, account.targets = int(store.lengths[numbers].sum()), int(targets[numbers].sum())
    account.shielded = int(store.shielded[numbers].sum())
    return numbers, account


def encoded(
    tokenizer: Tokenizer,
    policy: ChatPolicy,
    part: Part,
    token_dir: Path,
    advance: Callable[[int], None] = lambda count: None,
) -> TokenStore:
    """A part's examples, from disk where an earlier run encoded the same; else encoded now, and kept."""
    key = {
        "version": VERSION,
        "data": parts.fingerprint(part),
        "tokenizer": tokenizer.fingerprint(),
        "rows": tokenizer.rows,
        "policy": asdict(policy),
        "libraries": [tokenizers.__version__, transformers.__version__],
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    directory = token_dir.expanduser().resolve() / name
    store = TokenStore.open(directory, key)
    if store is not None:
        return store
    account = Account()
    examples = encode_stream(tokenizer, parts.read_part(part, account), policy)
    return TokenStore.write(directory, key, _counted(examples, advance), account)


def _counted(examples: Iterable[tuple[str, Example]], advance: Callable[[int], None]) -> Iterator[tuple[str, Example]]:
    for number, example in enumerate(examples, start=1):
        yield example
        if number % _EVERY == 0:
            advance(_EVERY)
