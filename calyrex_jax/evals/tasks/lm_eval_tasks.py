"""`mmlu` and `gsm8k`, run by lm-eval with this package's models, from a user's local files and without any download.

MMLU is asked as lm-eval's own task asks it: five worked examples of the subject, then the log-probabilities of the four
letters. GSM8K is lm-eval's task with five worked examples, strict and flexible extraction; one cell more compares numbers.
"""

from __future__ import annotations

import csv
import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.tasks.api import Ask, Curve, Item, Reader, Score, Verdict, thinned
from calyrex_jax.evals.tasks.files import local_file, read_rows

SHOTS = 5
INSTALL = "pip install 'lm-eval[ifeval]>=0.4.13,<0.5'"
_AT_ONCE = 256  # items a call of lm-eval: their verdicts are written before the next begin
_LETTERS = "ABCD"


@dataclass(frozen=True)
class Prompting:
    """How lm-eval writes its prompts: through the chat template, turns for examples, and under which system text."""

    chat: bool = False
    system: str = ""


@dataclass(frozen=True)
class MmluTask:
    """path: a directory with dev/SUBJECT_dev.csv and test/SUBJECT_test.csv, as hendrycks/test has them."""

    path: str
    prompting: Prompting = Prompting()
    limit: int = 0
    name = "mmlu"
    headline = "accuracy"
    about = (
        "MMLU, five worked examples of the same subject, the letter with the highest log-probability; run by lm-eval with its "
        "own prompt."
    )

    def items(self, reader: Reader) -> list[Item]:
        """One item a question of the subjects in test/."""
        _require()
        root = Path(self.path).expanduser()
        tests = sorted((root / "test").glob("*_test.csv"))
        if not tests:
            raise UserError(f"{self.path}: no test/SUBJECT_test.csv in it; give the directory of MMLU's csv files")
        found = []
        for path in tests:
            subject = path.name.removesuffix("_test.csv")
            examples = read_questions(root / "dev" / f"{subject}_dev.csv")[:SHOTS]
            if len(examples) < SHOTS:
                raise UserError(f"{root / 'dev'}: {subject}_dev.csv has {len(examples)} rows, {SHOTS} are needed")
            for number, doc in enumerate(read_questions(path)):
                message = {"role": "user", "content": doc["question"]}
                found.append(Item(f"{subject}/{number}", (message,), {"subject": subject, **doc}, judge=tuple(examples)))
        return thinned(found, self.limit)

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """By lm-eval."""
        return self.run_lm(model_of(ask, self.prompting), items)

    def run_lm(self, lm, items: Sequence[Item]) -> Iterator[Verdict]:
        """By lm-eval, with any of its models."""
        for chunk in _chunks(items):
            groups: dict[str, list[Item]] = {}
            for item in chunk:
                groups.setdefault(item.detail["subject"], []).append(item)
            tasks = [_task(_mmlu_config(subject), group, group[0].judge) for subject, group in groups.items()]
            for item, samples in _evaluated(lm, tasks, list(groups.values()), self.prompting):
                (sample,) = samples
                right, subject = bool(sample["acc"]), item.detail["subject"]
                scores = (Score("accuracy", right), Score(f"accuracy/{subject}", right))
                logprobs = [float(answer[0]) for answer in sample["filtered_resps"]]
                yield Verdict(item.id, scores, {"prompt": _prompt(sample), "logprobs": logprobs})

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """None."""
        return []


@dataclass(frozen=True)
class Gsm8kTask:
    """path: test.jsonl with question and answer; its first rows are the worked examples and are not asked."""

    path: str
    prompting: Prompting = Prompting()
    limit: int = 0
    new_tokens: int = 512
    name = "gsm8k"
    headline = "strict"
    about = (
        "GSM8K with the file's first five rows as worked examples (they are not asked). strict: lm-eval's exact match on "
        "'#### NUMBER'; flexible: its match on the last number; number: the last number equals the gold one as a number, so "
        "that $29.00 is 29 and a unit behind it does not matter."
    )

    def items(self, reader: Reader) -> list[Item]:
        """One item a row after the examples."""
        _require()
        rows = read_rows(str(local_file(self.path, "gsm8k")), {"question": str, "answer": str}, "the task gsm8k")
        for where, row in rows:
            if gold(row["answer"]) is None:
                raise UserError(f"{where}: no '#### NUMBER' at the end of the answer; gsm8k needs the gold number there")
        docs = [{"question": row["question"], "answer": row["answer"]} for _, row in rows]
        if len(docs) <= SHOTS:
            raise UserError(f"{self.path}: {len(docs)} rows; the first {SHOTS} are worked examples, so more are needed")
        examples = tuple(docs[:SHOTS])
        found = [
            Item(str(number), ({"role": "user", "content": doc["question"]},), doc, judge=examples)
            for number, doc in enumerate(docs[SHOTS:], SHOTS)
        ]
        return thinned(found, self.limit)

    def run(self, ask: Ask, items: Sequence[Item]) -> Iterator[Verdict]:
        """By lm-eval."""
        return self.run_lm(model_of(ask, self.prompting), items)

    def run_lm(self, lm, items: Sequence[Item]) -> Iterator[Verdict]:
        """By lm-eval, with any of its models."""
        for chunk in _chunks(items):
            tasks = [_task(_gsm8k_config(self.new_tokens), chunk, chunk[0].judge)]
            for item, samples in _evaluated(lm, tasks, [chunk], self.prompting):
                by_filter = {sample["filter"]: sample for sample in samples}
                reply = str(samples[0]["resps"][0][0])
                scores = (
                    Score("strict", bool(by_filter["strict-match"]["exact_match"])),
                    Score("flexible", bool(by_filter["flexible-extract"]["exact_match"])),
                    Score("number", last_number(reply) == gold(item.detail["answer"])),
                )
                yield Verdict(item.id, scores, {"prompt": _prompt(samples[0]), "reply": reply})

    def curves(self, cells: Iterable[str]) -> list[Curve]:
        """None."""
        return []


def read_questions(path: Path) -> list[dict[str, Any]]:
    """[{"question", "choices", "answer": 0…3}] of one headerless csv file; UserError with file:row for a broken one."""
    try:
        # newline="": fields hold line breaks of their own, and U+0085, which text mode would split at
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the directory of MMLU's csv files") from None
    found = []
    for number, row in enumerate(rows, 1):
        if len(row) != 6 or row[5].strip() not in _LETTERS or not row[5].strip():
            raise UserError(
                f"{path}:{number}: expected six fields, question, A, B, C, D and the right letter; got {len(row)}"
            )
        found.append({"question": row[0], "choices": row[1:5], "answer": _LETTERS.index(row[5].strip())})
    return found


def gold(answer: str) -> Decimal | None:
    """The number after "####", without thousands' commas.

    >>> gold("He has 3 * 400 = 1,200. #### 1,200")
    Decimal('1200')
    """
    return _number(answer.rpartition("####")[2]) if "####" in answer else None


def last_number(text: str) -> Decimal | None:
    r"""The last number in a reply: a currency sign before it, a unit behind it, commas and braces do not matter.

    >>> last_number("So she pays $29.00."), last_number("72 clips."), last_number(r"\boxed{8,000}")
    (Decimal('29.00'), Decimal('72'), Decimal('8000'))
    """
    found = re.findall(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", text)
    return _number(found[-1]) if found else None


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.strip().lstrip("$").replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def model_of(ask: Ask, prompting: Prompting):
    """The model under test as lm-eval knows models."""
    from calyrex_jax.evals.lm_eval_model import JaxLM

    return JaxLM(ask, system_instruction="" if prompting.chat else prompting.system)


def _require() -> None:
    try:
        import lm_eval.api.task  # noqa: F401
    except ImportError as error:
        raise UserError(f"eval tasks mmlu and gsm8k need {error.name or error}; run: {INSTALL}") from None


def _chunks(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    yield from (items[at : at + _AT_ONCE] for at in range(0, len(items), _AT_ONCE))


def _task(config: dict[str, Any], items: Sequence[Item], examples: Sequence[dict]):
    """lm-eval's task over these items, with these worked examples."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    splits = {
        "test": Dataset.from_list([dict(item.detail) for item in items]),
        "dev": Dataset.from_list([dict(example) for example in examples]),
    }
    shared = {
        "custom_dataset": lambda **_: splits,
        "test_split": "test",
        "fewshot_split": "dev",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": SHOTS,
        "metadata": {"version": 1.0},
    }
    logging.getLogger("lm_eval.api.task").setLevel(logging.ERROR)  # it explains custom data sets at every one
    return ConfigurableTask(config=shared | config)


def _mmlu_config(subject: str) -> dict[str, Any]:
    about = subject.replace("_", " ")
    return {
        "task": f"mmlu_{subject}",
        "description": f"The following are multiple choice questions (with answers) about {about}.\n\n",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question.strip()}}\nA. {{choices[0]}}\nB. {{choices[1]}}\nC. {{choices[2]}}\nD. {{choices[3]}}\nAnswer:",
        "doc_to_choice": list(_LETTERS),
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def _gsm8k_config(new_tokens: int) -> dict[str, Any]:
    return {
        "task": "gsm8k",
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_target": "{{answer}}",
        "metric_list": [
            {
                "metric": "exact_match",
                "aggregation": "mean",
                "higher_is_better": True,
                "ignore_case": True,
                "ignore_punctuation": False,
                "regexes_to_ignore": [",", "\\$", "(?s).*#### ", "\\.$"],
            }
        ],
        "generation_kwargs": {"until": ["Question:", "</s>", "<|im_end|>"], "do_sample": False, "max_gen_toks": new_tokens},
        "filter_list": [
            {
                "name": "strict-match",
                "filter": [{"function": "regex", "regex_pattern": r"#### (\-?[0-9\.\,]+)"}, {"function": "take_first"}],
            },
            {
                "name": "flexible-extract",
                "filter": [
                    {"function": "regex", "group_select": -1, "regex_pattern": r"(-?[$0-9.,]{2,})|(-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            },
        ],
    }


def _evaluated(lm, tasks: Sequence, groups: Sequence[Sequence[Item]], prompting: Prompting):
    """(item, lm-eval's samples of it, one a filter) for all items of all tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    out = lm_eval.simple_evaluate(
        lm,
        task_manager=TaskManager(include_defaults=False),  # the index of all of lm-eval's tasks takes some seconds
        tasks=list(tasks),
        log_samples=True,
        bootstrap_iters=0,
        apply_chat_template=prompting.chat,
        fewshot_as_multiturn=prompting.chat,
        system_instruction=prompting.system or None,
        verbosity="ERROR",
    )
    for task, items in zip(tasks, groups):
        samples: dict[int, list[dict]] = {}
        for sample in out["samples"][task.config.task]:
            samples.setdefault(sample["doc_id"], []).append(sample)
        for number, item in enumerate(items):
            yield item, samples[number]


def _prompt(sample: dict[str, Any]) -> str:
    """The text that the model was given."""
    arguments = sample["arguments"]
    first = arguments[0] if isinstance(arguments, list | tuple) else next(iter(arguments.values()))
    return str(first[0] if isinstance(first, list | tuple) else next(iter(first.values())))
