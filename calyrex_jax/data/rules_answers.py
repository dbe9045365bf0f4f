"""Makes assets/answers.jsonl, the frozen model's own replies that were found right. Run once, in three steps:

    python -m calyrex_jax.data.rules_answers --write-prompts=prompts.jsonl
    python -m calyrex_jax.main --config=configs/quickstart.py --workdir=EMPTY --mode=generate --input=prompts.jsonl \\
        --output=completions.jsonl --config.generate.max_new_tokens=96 --config.generate.temperature=0.0
    python -m calyrex_jax.data.rules_answers --from-completions=completions.jsonl

A workdir without a checkpoint runs the adapter as initialised, which is the frozen model bit for bit.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from absl import app, flags

from calyrex_jax.core.errors import UserError
from calyrex_jax.data.rules import control_prompts
from calyrex_jax.data.rules_checks import is_answered
from calyrex_jax.data.rules_questions import ASSETS, questions

_PROMPTS = flags.DEFINE_string("write-prompts", None, "File to write the prompts to, as JSON lines.")
_COMPLETIONS = flags.DEFINE_string("from-completions", None, "Output of --mode=generate for those prompts.")
_ANSWERS = flags.DEFINE_string("answers", str(ASSETS / "answers.jsonl"), "File to write the replies that are kept to.")


def prompts() -> list[dict]:
    """All prompts to be answered by the frozen model: every training question alone, and the controls."""
    return [question.prompt for question in questions() if question.split == "train"] + list(control_prompts())


def kept(rows: Iterable[dict]) -> list[dict]:
    """The replies worth keeping, sorted by id: right answers, and finished replies under irrelevant system texts.

    A bare question's reply must hold the answer; it may be cut (and says so), since its first sentence is of use. A
    control is kept whole or not at all: a cut one would teach to stop early.
    """
    asked = {question.prompt["id"]: question for question in questions()}
    controls = {prompt["id"] for prompt in control_prompts()}
    found = []
    for row in rows:
        name, reply = row["id"], row["completion"].strip()
        if name in asked:
            good = is_answered(reply, asked[name].answers, asked[name].needed)
        elif name in controls:
            good = row["finish_reason"] == "stop" and bool(reply)
        else:
            raise UserError(f"completions: unknown prompt id {name!r}; write the prompts anew with --write-prompts")
        if good:
            cut = {} if row["finish_reason"] == "stop" else {"cut": True}
            found.append({"id": name, "reply": reply, **cut})
    return sorted(found, key=lambda row: row["id"])


def _write(path: str, rows: Iterable[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def main(_: list[str]) -> None:
    """Runs the step that the flags name."""
    try:
        if _PROMPTS.value:
            _write(_PROMPTS.value, prompts())
        elif _COMPLETIONS.value:
            lines = Path(_COMPLETIONS.value).read_text(encoding="utf-8").splitlines()
            _write(_ANSWERS.value, kept(json.loads(line) for line in lines))
        else:
            raise UserError("rules_answers: give --write-prompts=FILE or --from-completions=FILE")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main)
