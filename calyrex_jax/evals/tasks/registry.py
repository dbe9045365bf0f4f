"""The tasks by name: from plain settings to the tasks that config.eval.tasks lists."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.scorers import make_scorer
from calyrex_jax.evals.tasks.api import Task, numbers
from calyrex_jax.evals.tasks.conflict import MOST_SHOTS, ConflictTask
from calyrex_jax.evals.tasks.ifeval import IfevalTask
from calyrex_jax.evals.tasks.lm_eval_tasks import Gsm8kTask, MmluTask, Prompting
from calyrex_jax.evals.tasks.long_context import LONGEST, LongContextTask
from calyrex_jax.evals.tasks.perplexity import PerplexityTask, ValidationTask
from calyrex_jax.evals.tasks.preference import PreferenceTask
from calyrex_jax.evals.tasks.privacy import PrivacyTask
from calyrex_jax.evals.tasks.rules import RulesTask
from calyrex_jax.evals.tasks.safety import HarmbenchTask, XstestTask
from calyrex_jax.evals.tasks.turns import TurnsTask


@dataclass(frozen=True)
class Settings:
    """config.eval as tasks take it: fields as the config has them, data by task name."""

    limit: int
    seed: int
    new_tokens: int
    long_new_tokens: int
    context_lengths: str
    filler: str
    turns: int
    shots: str
    prompting: Prompting
    data: dict[str, str]
    scorer: str = ""
    far_limit: int = 0
    limits: dict[str, int] = field(default_factory=dict)


def _long_context(s: Settings) -> LongContextTask:
    lengths = numbers(s.context_lengths, "config.eval.context_lengths", 0, LONGEST)
    return LongContextTask(lengths, s.filler, s.limit, s.seed, s.new_tokens, s.far_limit)


def _conflict(s: Settings) -> ConflictTask:
    shots = numbers(s.shots, "config.eval.shots", 0, MOST_SHOTS)
    return ConflictTask(shots, s.limit, s.seed, s.new_tokens, s.far_limit)


def _preference(s: Settings) -> PreferenceTask:
    lengths = numbers(s.context_lengths, "config.eval.context_lengths", 0, LONGEST)
    shots = numbers(s.shots, "config.eval.shots", 0, MOST_SHOTS)
    return PreferenceTask(lengths, shots, s.filler, s.limit, s.far_limit, s.seed)


# name -> (maker, whether it reads a file: "no", "may", "must")
TASKS = {
    "rules": (lambda s: RulesTask(s.limit, s.new_tokens), "no"),
    "long_context": (_long_context, "no"),
    "turns": (lambda s: TurnsTask(s.turns, s.limit, s.seed, s.new_tokens), "no"),
    "conflict": (_conflict, "no"),
    "preference": (_preference, "no"),
    "ifeval": (lambda s: IfevalTask(s.data["ifeval"], False, s.limit, s.long_new_tokens), "must"),
    "ifeval_system": (lambda s: IfevalTask(s.data["ifeval_system"], True, s.limit, s.long_new_tokens), "must"),
    "mmlu": (lambda s: MmluTask(s.data["mmlu"], s.prompting, s.limit), "must"),
    "gsm8k": (lambda s: Gsm8kTask(s.data["gsm8k"], s.prompting, s.limit, s.long_new_tokens), "must"),
    "perplexity": (lambda s: PerplexityTask(s.data.get("perplexity", ""), s.limit), "may"),
    "validation": (lambda s: ValidationTask(s.data.get("validation", ""), s.limit), "may"),
    "privacy": (lambda s: PrivacyTask(s.limit, s.seed, s.new_tokens, make_scorer(s.scorer)), "no"),
    "privacy_rule": (lambda s: PrivacyTask(s.limit, s.seed, s.new_tokens, make_scorer(s.scorer), system_rule=True), "no"),
    "harmbench": (lambda s: HarmbenchTask(s.data["harmbench"], s.limit, s.long_new_tokens, make_scorer(s.scorer)), "must"),
    "xstest": (lambda s: XstestTask(s.data["xstest"], s.limit, s.new_tokens, make_scorer(s.scorer)), "must"),
}


def make_tasks(names: str, settings: Settings) -> list[Task]:
    """The tasks of "rules,perplexity"; UserError for an unknown name, a repetition, or a task without its file."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in TASKS]
    if unknown or not wanted or len(set(wanted)) < len(wanted):
        what = f"unknown task {unknown[0]!r}" if unknown else "each task once, at least one"
        raise UserError(f"config.eval.tasks is {names!r}: {what}; known: {', '.join(TASKS)}")
    for name in wanted:
        if TASKS[name][1] == "must" and not settings.data.get(name):
            raise UserError(f"config.eval.data: the task {name} needs its file; give --config.eval.data={name}=PATH")
    return [TASKS[name][0](replace(settings, limit=settings.limits.get(name, settings.limit))) for name in wanted]


def parse_limits(text: str, names: str) -> dict[str, int]:
    """config.eval.limits, "turns=50,rules=0", by task; UserError where it is not understood.

    >>> parse_limits("turns=50", "rules,turns")
    {'turns': 50}
    """
    known, found = [name.strip() for name in names.split(",")], {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.partition("=")
        if name not in known or not number.isdecimal():
            raise UserError(
                f"config.eval.limits: {entry!r} is not understood; write TASK=ITEMS for a task of config.eval.tasks "
                f"({', '.join(known)})"
            )
        found[name] = int(number)
    return found


def parse_data(text: str, names: str) -> dict[str, str]:
    """config.eval.data: "ifeval=FILE,perplexity=FILE", or a bare path where one of the tasks reads a file.

    >>> parse_data("chats.jsonl", "rules,perplexity")
    {'perplexity': 'chats.jsonl'}
    """
    readers = [name.strip() for name in names.split(",") if TASKS.get(name.strip(), (None, "no"))[1] != "no"]
    found = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, equals, path = entry.partition("=")
        if not equals and len(readers) == 1:
            name, path = readers[0], entry
        if name not in readers or not path:
            raise UserError(
                f"config.eval.data: {entry!r} is not understood; write TASK=PATH for a task of config.eval.tasks that reads "
                f"a file ({', '.join(readers) or 'none of them does'})"
            )
        found[name] = path
    return found
