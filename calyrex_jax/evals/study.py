"""Tasks by models: runs what is missing, keeps every verdict, and makes figures and paired differences of them.

found = run(tasks, subjects, journals…)
found.figures["rules"]["cal"]["unseen_words"]            # Figure
found.differences["rules"]["cal - frozen"]["unseen_words"]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np

from calyrex_jax.evals import stats
from calyrex_jax.evals.ask import generate_together, prefer_together
from calyrex_jax.evals.journal import Journal, verdict_key
from calyrex_jax.evals.stats import Figure
from calyrex_jax.evals.tasks.api import Ask, Item, Score, Task, Verdict, verdict_on, verdict_on_pair
from calyrex_jax.metrics import Metrics

Verdicts = dict[str, Verdict]  # by item


@dataclass(frozen=True)
class Subject:
    """One model under test.

    digest  of everything that its replies depend on: weights, types, template, reply length
    ask     makes the Ask; gets what is to be called after every batch with the number of conversations done
    shares  equal for subjects whose Asks are `ModelAsk`s of one backbone and one first boundary; None: it runs alone
    """

    name: str
    digest: str
    ask: Callable[[Callable[[int], None]], Ask]
    shares: int | None = None


@dataclass(frozen=True)
class Findings:
    """Figures by task, model and cell; differences by task, "b - a" and cell (of a perplexity: the ratio b / a).

    verdicts  what both were made of, by task and model
    """

    figures: dict[str, dict[str, dict[str, Figure]]]
    differences: dict[str, dict[str, dict[str, Figure]]]
    verdicts: dict[str, dict[str, Verdicts]]


def run(
    tasks: Sequence[Task],
    items: Mapping[str, Sequence[Item]],
    subjects: Sequence[Subject],
    directory: Path,
    show: Metrics,
    check: Callable[[], None] = lambda: None,
    seed: int = 0,
) -> Findings:
    """`collect`, and the figures and all differences of what it gives."""
    return every_pair(collect(tasks, items, subjects, directory, show, check), seed)


def collect(
    tasks: Sequence[Task],
    items: Mapping[str, Sequence[Item]],
    subjects: Sequence[Subject],
    directory: Path,
    show: Metrics,
    check: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Verdicts]]:
    """All tasks for all subjects. Verdicts are in DIR/TASK.MODEL.jsonl; those of an earlier run are kept where they hold.

    check  called after every batch; may raise to stop, and nothing that was written is lost
    """
    return {task.name: _verdicts(task, items[task.name], subjects, directory, show, check) for task in tasks}


def every_pair(verdicts: dict[str, dict[str, Verdicts]], seed: int = 0) -> Findings:
    """Figures of all verdicts, and the differences of all pairs of models."""
    names = list(next(iter(verdicts.values())))
    return findings(verdicts, [(b, a) for b, a in combinations(names, 2)], seed)


def findings(verdicts: dict[str, dict[str, Verdicts]], pairs: Sequence[tuple[str, str]], seed: int = 0) -> Findings:
    """Figures of all verdicts, and the differences b - a of the pairs (b, a)."""
    figures = {task: {name: cells(v.values(), seed) for name, v in models.items()} for task, models in verdicts.items()}
    differences = {
        task: {f"{b} - {a}": compared(models[a], models[b], seed) for b, a in pairs} for task, models in verdicts.items()
    }
    return Findings(figures, differences, verdicts)


def pooled(runs: Sequence[Verdicts]) -> Verdicts:
    """Several runs of one method as one: an item's scores are summed over the runs, so that the bootstrap resamples items."""
    found = {}
    for item in runs[0]:
        same: dict[str, list[Score]] = {}
        for run in runs:
            for score in run[item].scores:
                same.setdefault(score.cell, []).append(score)
        summed = (Score(cell, sum(s.total for s in of), sum(s.count for s in of), of[0].kind) for cell, of in same.items())
        found[item] = Verdict(item, tuple(summed), {})
    return found


def _verdicts(
    task: Task, items: Sequence[Item], subjects: Sequence[Subject], directory: Path, show: Metrics, check: Callable[[], None]
) -> dict[str, Verdicts]:
    """{subject: the verdict on every item}, from the journals where they have one."""
    files = {s.name: _Part(task, items, s, directory) for s in subjects}
    for part in files.values():
        if kept := len(items) - len(part.missing):
            show.say(f"{task.name}, {part.subject.name}: {kept} of {len(items)} verdicts kept from {part.journal.path}")
    for group, missing in _groups(task, list(files.values())):
        label = f"{task.name}, {' and '.join(part.subject.name for part in group)}"
        with show.phase(label, len(missing) * len(group), unit="verdict") as bar:

            def advance(count: int, bar=bar) -> None:
                bar.postfix()  # a bar that moves only with whole items still shows that it is alive
                check()

            for part, verdict in _run(task, group, missing, advance):
                part.add(verdict)
                bar.update(1)
    found = {}
    for name, part in files.items():
        part.journal.close()
        found[name] = {item.id: part.journal.get(part.keys[item.id]) for item in items}
    return found


class _Part:
    """One task of one subject: its journal, and the items that it lacks."""

    def __init__(self, task: Task, items: Sequence[Item], subject: Subject, directory: Path):
        self.subject = subject
        self.journal = Journal.open(directory / f"{task.name}.{subject.name}.jsonl", subject.digest)
        self.keys = {item.id: verdict_key(task, item, subject.digest) for item in items}
        self.missing = [item for item in items if self.journal.get(self.keys[item.id]) is None]
        self._items = {item.id: item for item in items}

    def add(self, verdict: Verdict) -> None:
        """Writes a verdict."""
        self.journal.add(self.keys[verdict.item], self.subject.digest, self._items[verdict.item], verdict)


def _groups(task: Task, parts: Sequence[_Part]) -> list[tuple[list[_Part], list[Item]]]:
    """What is run in one go: parts that lack the same items and share layers, if the task asks once; else each alone."""
    groups: dict[tuple, list[_Part]] = {}
    for number, part in enumerate(parts):
        together = (hasattr(task, "judge") or hasattr(task, "pair")) and part.subject.shares is not None
        key = (part.subject.shares, tuple(item.id for item in part.missing)) if together else (number,)
        groups.setdefault(key, []).append(part)
    return [(group, group[0].missing) for group in groups.values() if group[0].missing]


def _run(task: Task, group: Sequence[_Part], missing: Sequence[Item], advance: Callable[[int], None]):
    """(part, verdict) for every missing item of every part."""
    asks = {part.subject.name: part.subject.ask(advance) for part in group}
    if len(group) == 1:
        yield from ((group[0], verdict) for verdict in task.run(asks[group[0].subject.name], missing))
        return
    if hasattr(task, "pair"):
        for index, logprobs in prefer_together(asks, [task.pair(item) for item in missing]):
            for part in group:
                yield part, verdict_on_pair(task, missing[index], logprobs[part.subject.name])
        return
    for index, answers in generate_together(asks, [item.messages for item in missing], task.new_tokens):
        for part in group:
            yield part, verdict_on(task, missing[index], answers[part.subject.name])


def _by_cell(verdicts) -> dict[str, dict[str, Score]]:
    """{cell: {item: score}} in order of first appearance."""
    found: dict[str, dict[str, Score]] = {}
    for verdict in verdicts:
        for score in verdict.scores:
            found.setdefault(score.cell, {})[verdict.item] = score
    return found


def cells(verdicts, seed: int = 0) -> dict[str, Figure]:
    """Figures by cell: Wilson's interval for rates over single tries, else the bootstrap over items."""
    return {cell: _figure(list(scores.values()), seed) for cell, scores in _by_cell(verdicts).items()}


def _figure(scores: Sequence[Score], seed: int) -> Figure:
    totals, counts = np.array([s.total for s in scores], float), np.array([s.count for s in scores], float)
    kind = scores[0].kind
    if kind == "perplexity":
        return stats.perplexity(totals, counts, seed=seed)
    if kind == "rate" and (counts == 1).all():
        return stats.rate(totals)
    return stats.ratio(totals, counts, seed=seed, percent=kind == "rate")


def compared(before: Verdicts, after: Verdicts, seed: int = 0) -> dict[str, Figure]:
    """after - before by cell, over the items that both have there, resampled in pairs; of perplexities the ratio.

    Where two rates differ alike on every item, as where they agree on all, the bootstrap would claim certainty ([0, 0]);
    the interval is then that of `stats.paired_rate_difference`.
    """
    old, new = _by_cell(before.values()), _by_cell(after.values())
    found = {}
    for cell in (c for c in old if c in new):
        shared = [item for item in old[cell] if item in new[cell]]
        if shared:
            found[cell] = _difference([old[cell][i] for i in shared], [new[cell][i] for i in shared], seed)
    return found


def _difference(before: Sequence[Score], after: Sequence[Score], seed: int) -> Figure:
    old, new = (np.array([s.total for s in scores], float) for scores in (before, after))
    counts = np.array([s.count for s in before], float)
    kind = before[0].kind
    if kind == "perplexity":
        return stats.perplexity(new - old, counts, seed=seed)
    if kind == "rate" and (counts == 1).all() and len(set(new - old)) == 1:
        return stats.paired_rate_difference(old, new)
    return stats.ratio(new - old, counts, seed=seed, percent=kind == "rate")
