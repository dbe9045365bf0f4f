"""Makes assets/answers.jsonl and held_out.jsonl, the frozen model's own replies. Run once, in four steps:

    python -m calyrex_jax.data.rules_answers --write-prompts=DIR
    python -m calyrex_jax.main --config=configs/quickstart.py --workdir=EMPTY --mode=generate --input=DIR/questions.jsonl \\
        --output=DIR/answered.jsonl --config.generate.max_new_tokens=96 --config.generate.temperature=0.0
    python -m calyrex_jax.main --config=configs/quickstart.py --workdir=EMPTY --mode=generate --input=DIR/controls.jsonl \\
        --output=DIR/controlled.jsonl --config.generate.max_new_tokens=112 --config.generate.temperature=1.0
    python -m calyrex_jax.data.rules_answers --from-completions=DIR/answered.jsonl,DIR/controlled.jsonl

held_out.jsonl is made of DIR/held_out.jsonl as the questions are, with 48 new tokens and --answers naming the file to write.

A workdir without a checkpoint runs the adapter as initialised, which is the frozen model bit for bit. Questions are answered
greedily, to have the model's best answer. Controls are sampled at temperature 1: cross-entropy on samples from the frozen
model's own distribution has its minimum at that distribution, on greedy replies it would sharpen it.
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

_PROMPTS = flags.DEFINE_string(
    "write-prompts", None, "Directory to write questions.jsonl, held_out.jsonl and controls.jsonl to."
)
_COMPLETIONS = flags.DEFINE_list("from-completions", None, "Outputs of --mode=generate for those files.")
_ANSWERS = flags.DEFINE_string("answers", str(ASSETS / "answers.jsonl"), "File to write the replies that are kept to.")


def prompts() -> dict[str, list[dict]]:
    """All prompts to be answered by the frozen model, by file name: every question alone, by split, and the controls."""
    asked, held_out = ([q.prompt for q in questions() if q.split == split] for split in ("train", "test"))
    return {"questions": asked, "held_out": held_out, "controls": list(control_prompts())}


def kept(rows: Iterable[dict]) -> list[dict]:
    """The replies worth keeping, sorted by id: right answers to the questions, and whatever was said to the controls.

    Replies may be cut: of an answer the first sentence is used, and a control's end is not learned.
    """
    asked = {question.prompt["id"]: question for question in questions()}
    controls = {prompt["id"] for prompt in control_prompts()}
    found = []
    for row in rows:
        name, reply = row["id"], row["completion"].strip()
        if name in asked:
            good = is_answered(reply, asked[name].answers, asked[name].needed)
        elif name in controls:
            good = bool(reply)
        else:
            raise UserError(f"completions: unknown prompt id {name!r}; write the prompts anew with --write-prompts")
        if good:
            found.append({"id": name, "reply": reply})
    return sorted(found, key=lambda row: row["id"])


def _write(path: str, rows: Iterable[dict]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    Path(path).write_text(text, encoding="utf-8")


def main(_: list[str]) -> None:
    """Runs the step that the flags name."""
    try:
        if _PROMPTS.value:
            for name, rows in prompts().items():
                _write(str(Path(_PROMPTS.value) / f"{name}.jsonl"), rows)
        elif _COMPLETIONS.value:
            files = [Path(name).read_text(encoding="utf-8") for name in _COMPLETIONS.value]
            _write(_ANSWERS.value, kept(json.loads(line) for text in files for line in text.splitlines()))
        else:
            raise UserError("rules_answers: give --write-prompts=DIR or --from-completions=FILE,FILE")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    app.run(main)
