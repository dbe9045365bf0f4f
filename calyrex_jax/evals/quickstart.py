"""The held-out evaluation of the embedded corpus: rule adherence by cell and rule, right answers, perplexity of plain chat.

Every reply and verdict is written as JSON lines, so that any figure can be audited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from calyrex_jax.core.types import Tree
from calyrex_jax.data import chat, rules
from calyrex_jax.data.tokenizer import Tokenizer
from calyrex_jax.evals import plots, stats
from calyrex_jax.evals.report import Report, text_table, write_text
from calyrex_jax.evals.stats import Figure
from calyrex_jax.evals.tasks.api import Scored, thinned
from calyrex_jax.evals.tasks.perplexity import reply_logprob
from calyrex_jax.generate import loop, score
from calyrex_jax.metrics import Metrics
from calyrex_jax.model import Model


@dataclass(frozen=True)
class Judge:
    """What an evaluation needs beside parameters."""

    model: Model
    tokenizer: Tokenizer
    policy: chat.ChatPolicy
    stop_ids: frozenset[int]
    batch_size: int
    max_new_tokens: int
    limit: int = 0  # items; 0 is all, else every n-th so that all cells are met

    def items(self) -> list[rules.Item]:
        """The held-out items of this evaluation."""
        return thinned(rules.evaluation_set(), self.limit)


def evaluate(
    judge: Judge, backbone: Tree, variants: dict[str, Tree], directory: Path, show: Metrics, check: Callable[[], None]
) -> dict[str, dict]:
    """{variant: {cell: Figure}, "by_rule": {variant: {"cell/rule": Figure}}} for adapters by name, such as frozen and adapted.

    The frozen model is the adapters as initialised: equal bit for bit, and it shares the compiled programs. Writes
    DIR/evaluation/VARIANT.jsonl; `check()` is called after every batch and may raise to stop.
    """
    items = judge.items()
    replies = _replies(judge, backbone, variants, items, show, check)
    found: dict[str, dict] = {"by_rule": {}}
    measured = {}
    for name, adapters in variants.items():
        verdicts = [rules.check(item, reply) for item, reply in zip(items, replies[name])]
        _write_items(directory / "evaluation" / f"{name}.jsonl", items, replies[name], verdicts)
        cells, found["by_rule"][name] = _figures(items, verdicts)
        params = {"backbone": backbone, "adapters": adapters}
        measured[name] = plain_chat_logprobs(judge, params, f"perplexity, {name}", show, check)
        found[name] = cells | {"perplexity": stats.perplexity(*measured[name])}
    if {"frozen", "adapted"} <= measured.keys():
        change = np.subtract(measured["adapted"][0], measured["frozen"][0])
        found["perplexity_ratio"] = stats.perplexity(change, measured["frozen"][1])
    return found


def _replies(judge: Judge, backbone: Tree, variants: dict[str, Tree], items, show: Metrics, check) -> dict[str, list[str]]:
    where = [item.id for item in items]
    prompts = [
        chat.encode(judge.tokenizer, list(item.messages), for_generation=True, policy=judge.policy, where=item.id)
        for item in items
    ]
    with show.phase("evaluating", len(prompts) * len(variants), unit="reply") as bar:

        def advance(done: int, tokens: int) -> None:
            bar.update(done - bar.done)
            check()

        replies = loop.compare(
            judge.model,
            backbone,
            variants,
            prompts,
            max_new_tokens=judge.max_new_tokens,
            stop_ids=judge.stop_ids,
            pad_id=judge.tokenizer.pad_id,
            batch_size=judge.batch_size,
            vocab_limit=judge.tokenizer.vocab_size,
            where=where,
            progress=advance,
        )
    return {name: [judge.tokenizer.decode(reply.text_tokens) for reply in found] for name, found in replies.items()}


def plain_chat_logprobs(judge: Judge, params: Tree, phase: str, show: Metrics, check) -> tuple[np.ndarray, np.ndarray]:
    """Summed log-probability and number of the reply tokens of each plain chat, under its irrelevant system text."""
    examples = [chat.encode(judge.tokenizer, c["messages"], policy=judge.policy) for c in rules.plain_chats()]
    with show.phase(phase, len(examples), unit="chat") as bar:

        def advance(done: int, tokens: int) -> None:
            bar.update(done - bar.done)
            check()

        scored = score.scores(judge.model, params, examples, pad_id=judge.tokenizer.pad_id, batch_size=8, progress=advance)
    pairs = [reply_logprob(Scored(e.tokens, line, e.targets)) for e, line in zip(examples, scored)]
    return np.array([total for total, _ in pairs]), np.array([count for _, count in pairs])


def _figures(items: Sequence[rules.Item], verdicts: Sequence[rules.Verdict]) -> tuple[dict[str, Figure], dict[str, Figure]]:
    """Rates by cell (and over all items for right answers), and by "cell/rule"."""
    hits: dict[str, list[bool]] = {}
    for item, verdict in zip(items, verdicts):
        hits.setdefault(item.cell, []).append(verdict.follows)
        hits.setdefault(f"{item.cell}/{item.rule}", []).append(verdict.follows)
        hits.setdefault("answers", []).append(verdict.answered)
        hits.setdefault(f"answers/{item.rule}", []).append(verdict.answered)
    rates = {name: stats.rate(values) for name, values in hits.items()}
    return {n: f for n, f in rates.items() if "/" not in n}, {n: f for n, f in sorted(rates.items()) if "/" in n}


def _write_items(path: Path, items, replies, verdicts) -> None:
    lines = [
        {
            "id": item.id,
            "cell": item.cell,
            "rule": item.rule,
            "variant": item.variant,
            "messages": list(item.messages),
            "reply": reply,
        }
        | {"follows": verdict.follows, "answered": verdict.answered, "answers": list(item.question.answers)}
        for item, reply, verdict in zip(items, replies, verdicts)
    ]
    write_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def as_report(found: dict[str, dict], directory: Path, losses: tuple[Sequence[float], Sequence[float]]) -> str:
    """Writes DIR/report.html and returns the table for the terminal; `losses` are (steps, losses)."""
    frozen, adapted = found["frozen"], found["adapted"]
    cells = [cell for cell in frozen if cell != "perplexity"]
    columns = ["held-out cell", "frozen", "adapted"]
    rows = [[cell, frozen[cell], adapted[cell]] for cell in (*cells, "perplexity")]
    by_rule = [[name, figure, found["by_rule"]["adapted"][name]] for name, figure in found["by_rule"]["frozen"].items()]
    report = Report("Following the system prompt: frozen and adapted model")
    report.text(
        "Rates of replies that a checker finds to follow the system prompt's rule, on questions, words, phrasings and a rule "
        "family held out from training; controls have no rule and must be plain; answers counts right answers over all items. "
        "Intervals are 95 %: Wilson for rates, bootstrap over texts for the perplexity of plain chat under irrelevant system texts."
    )
    report.table("By cell", columns, rows, note=f"perplexity adapted / frozen: {found['perplexity_ratio']}")
    report.plot(
        "Adherence", plots.bars(cells, {"frozen": [frozen[c] for c in cells], "adapted": [adapted[c] for c in cells]})
    )
    if losses[0]:
        report.plot("Training loss", plots.curves({"loss": losses}, "step", "loss, nats a target token"))
    report.table("By cell and rule", columns, by_rule)
    report.write_html(directory / "report.html")
    return text_table(columns, rows + by_rule) + f"\nperplexity adapted / frozen: {found['perplexity_ratio']}"
