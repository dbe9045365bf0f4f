"""A corpus encoded in one go and held as a whole, without files: what those that come from disk are compared with."""

import numpy as np

from calyrex_jax.data import chat


def encode_corpus(tokenizer, conversations, max_length, policy=None):
    """(examples, report) of [(where, {"messages": …}), …], by the rules of `corpus.load_corpus`."""
    policy = policy or chat.ChatPolicy()
    chat.refuse_endless(tokenizer, policy)
    given = list(conversations)
    encoded = list(chat.encode_stream(tokenizer, given, policy))
    report = chat.CorpusReport(read=len(given))
    lengths = np.array([len(example.tokens) for _, example in encoded], np.int64)
    targets = np.array([example.targets.sum() for _, example in encoded], np.int64)
    kept = chat.select(lengths, targets, lambda i: encoded[i][0], max_length, report)
    chat.refuse_empty(report, max_length)
    examples = [encoded[i][1] for i in kept]
    report.tokens, report.targets = int(lengths[kept].sum()), int(targets[kept].sum())
    report.shielded = sum(example.shielded for example in examples)
    return examples, report
