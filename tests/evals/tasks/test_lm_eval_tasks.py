"""MMLU and GSM8K: lm-eval's own prompts and metrics over local files, numbers read as numbers, broken files named."""

from decimal import Decimal
from pathlib import Path

import pytest

from calyrex_jax import build
from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.ask import ChatReader, ModelAsk
from calyrex_jax.evals.tasks import lm_eval_tasks
from calyrex_jax.evals.tasks.lm_eval_tasks import Gsm8kTask, MmluTask, Prompting, gold, last_number, read_questions
from tests import tiny_runs
from tests.evals.fakes import WordReader, scores_of
from tests.tiny_runs import make_config, write_jsonl

yaml = pytest.importorskip("yaml")
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install '.[eval]')")
OFFICIAL = Path(lm_eval.__file__).parent / "tasks"


def write_mmlu(root, tests=3):
    for split, count in (("dev", 6), ("test", tests)):
        (root / split).mkdir(parents=True)
        for subject in ("high_school_tea", "knots"):
            rows = [f'"{subject} {i}, isn\'t it?",a,"b,b",c,d,{"ABCD"[i % 4]}\n' for i in range(count)]
            (root / split / f"{subject}_{split}.csv").write_text("".join(rows), encoding="utf-8")
    return root


GSM = [{"question": f"What is {i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in range(8)]


def test_mmlu_asks_as_lm_evals_own_task_does():
    theirs = yaml.safe_load((OFFICIAL / "mmlu/default/_default_template_yaml").read_text())
    subject = yaml.safe_load((OFFICIAL / "mmlu/default/mmlu_high_school_biology.yaml").read_text())
    ours = lm_eval_tasks._mmlu_config("high_school_biology")
    for field in ("output_type", "doc_to_text", "doc_to_choice", "doc_to_target", "metric_list"):
        assert ours[field] == theirs[field], field
    assert (ours["description"], ours["task"]) == (subject["description"], subject["task"])


def test_gsm8k_asks_and_scores_as_lm_evals_own_task_does():
    theirs = yaml.safe_load((OFFICIAL / "gsm8k/gsm8k.yaml").read_text())
    ours = lm_eval_tasks._gsm8k_config(512)
    for field in ("output_type", "doc_to_text", "doc_to_target", "metric_list", "filter_list"):
        assert ours[field] == theirs[field], field
    assert ours["generation_kwargs"]["until"] == theirs["generation_kwargs"]["until"]
    assert theirs["num_fewshot"] == lm_eval_tasks.SHOTS


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_verdicts_of_a_tiny_model(tmp_path, chat):
    model = tiny_runs.write_model(tmp_path / "model", max_position_embeddings=2048)
    opened = build.open_run(make_config(model, adapter__name="prompt_only"))
    params = {"backbone": build.load_weights(opened), "adapters": {}}
    reader = ChatReader(opened.tokenizer, opened.policy, 2048)
    ask = ModelAsk(reader, opened.model, params, opened.stop_ids, 4, 8192)
    prompting = Prompting(chat, "Be brief." if chat else "")

    task = MmluTask(str(write_mmlu(tmp_path / "mmlu", tests=2)), prompting)
    items = task.items(reader)
    assert [item.id for item in items] == ["high_school_tea/0", "high_school_tea/1", "knots/0", "knots/1"]
    verdicts = {verdict.item: verdict for verdict in task.run(ask, items)}
    assert set(verdicts) == {item.id for item in items}
    for item in items:
        said, scores = verdicts[item.id].said, scores_of(verdicts[item.id])
        best = max(range(4), key=said["logprobs"].__getitem__)
        assert scores["accuracy"] == (best == item.detail["answer"], 1) == scores[f"accuracy/{item.detail['subject']}"]
        assert f"about {item.detail['subject'].replace('_', ' ')}." in said["prompt"]
        assert said["prompt"].count("Answer:") == 6 and ("<|im_start|>" in said["prompt"]) is chat
        assert ("Be brief." in said["prompt"]) is chat

    task = Gsm8kTask(str(write_jsonl(tmp_path / "gsm.jsonl", GSM)), prompting, limit=2, new_tokens=6)
    items = task.items(reader)
    assert [item.id for item in items] == ["5", "6", "7"]
    verdicts = {verdict.item: verdict for verdict in task.run(ask, items)}
    for item in items:
        said = verdicts[item.id].said
        assert all(row["question"] in said["prompt"] for row in GSM[:5]) and item.detail["question"] in said["prompt"]
        assert set(scores_of(verdicts[item.id])) == {"strict", "flexible", "number"}


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("$29.00", "29"),
        ("72 clips.", "72"),
        (r"So it is \boxed{8,000}.", "8000"),
        ("#### -5", "-5"),
        ("first 3, then 1,234,567.50 dollars", "1234567.50"),
        ("1,2", "2"),
        ("none", None),
        ("", None),
    ],
)
def test_the_last_number(reply, number):
    assert last_number(reply) == (None if number is None else Decimal(number))


def test_gold():
    assert gold("so 3 * 4 = <<3*4=12>>12\n#### 1,200") == 1200
    assert gold("12") is None and gold("#### twelve") is None


def test_csv_fields_with_line_breaks_and_odd_characters(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('"one\ntwo\x85three",w,x,"y ""quoted""",z,C\n', encoding="utf-8", newline="")
    assert read_questions(path) == [{"question": "one\ntwo\x85three", "choices": ["w", "x", 'y "quoted"', "z"], "answer": 2}]


def test_broken_files_are_named(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("q,a,b,c,d,A\nq,a,b,c,d,E\n")
    with pytest.raises(UserError, match=r"a\.csv:2: expected six fields"):
        read_questions(path)
    with pytest.raises(UserError, match=r"no test/SUBJECT_test\.csv"):
        MmluTask(str(tmp_path)).items(WordReader())
    with pytest.raises(UserError, match=r"g\.jsonl:2: no '#### NUMBER'"):
        Gsm8kTask(str(write_jsonl(tmp_path / "g.jsonl", [GSM[0], GSM[1] | {"answer": "2"}]))).items(WordReader())
    with pytest.raises(UserError, match=r'g\.jsonl:1: "answer" is nothing, expected str'):
        Gsm8kTask(str(write_jsonl(tmp_path / "g.jsonl", [{"question": "a"}]))).items(WordReader())
    with pytest.raises(UserError, match="4 rows; the first 5 are worked examples"):
        Gsm8kTask(str(write_jsonl(tmp_path / "g.jsonl", GSM[:4]))).items(WordReader())
    (write_mmlu(tmp_path / "m") / "dev" / "knots_dev.csv").write_text("q,a,b,c,d,A\n")
    with pytest.raises(UserError, match=r"knots_dev\.csv has 1 rows, 5 are needed"):
        MmluTask(str(tmp_path / "m")).items(WordReader())
