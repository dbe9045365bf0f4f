"""IFEval: the library's own verdicts, offline and repeatable, and what a broken file is told."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.tasks.ifeval import IfevalTask, checkers, judge, scores_of
from tests.evals import fakes
from tests.evals.fakes import Says, WordReader
from tests.tiny_runs import ROOT, write_jsonl

pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install '.[eval]')")

ROWS = [
    {
        "key": 1,
        "prompt": "Write about tea without commas, in at least 5 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"relation": "at least", "num_words": 5}],
    },
    {
        "key": 2,
        "prompt": "Write a poem in all capital letters.",
        "instruction_id_list": ["change_case:english_capital"],
        "kwargs": [{}],
    },
    {
        "key": 3,
        "prompt": "Three sentences, please.",
        "instruction_id_list": ["length_constraints:number_sentences"],
        "kwargs": [{"relation": "less than", "num_sentences": 3}],
    },
]


def figures(row, reply):
    found = {score.cell: (float(score.total), score.count) for score in judge(row, reply)}
    return [found[cell] for cell in ("prompt strict", "prompt loose", "instruction strict", "instruction loose")]


@pytest.mark.parametrize(
    ("row", "reply", "expected"),
    [
        (0, "Tea is a warm drink for rainy days.", [(1, 1), (1, 1), (2, 2), (2, 2)]),
        (0, "Tea, a warm drink for rainy days.", [(0, 1), (0, 1), (1, 2), (1, 2)]),
        # loose: without its first line the reply has no comma
        (0, "Sure, here it is:\nTea is a warm drink for rainy days.", [(0, 1), (1, 1), (1, 2), (2, 2)]),
        (0, "", [(0, 1), (0, 1), (0, 2), (0, 2)]),
        (1, "THE RAIN FALLS ON THE ROOF AND ON THE GARDEN", [(1, 1), (1, 1), (1, 1), (1, 1)]),
        (1, "The rain falls on the roof", [(0, 1), (0, 1), (0, 1), (0, 1)]),
        # "Dr." ends no sentence: the sentence model is NLTK's, not a split at full stops
        (2, "Dr. Smith met Mr. Jones at 5 p.m. in the hall. They talked.", [(1, 1), (1, 1), (1, 1), (1, 1)]),
        (2, "They met. They talked. They left.", [(0, 1)] * 4),
    ],
)
def test_known_verdicts(row, reply, expected):
    assert figures(ROWS[row], reply) == expected


def test_the_scores_are_the_librarys_own():
    scoring = checkers()
    for row in ROWS:
        for reply in (
            "Tea is warm.",
            "TEA IS WARM AND GOOD FOR YOU",
            "One. Two. Three. Four.",
            "*Sure*\nTea is a warm drink",
        ):
            strict = scoring.test_instruction_following_strict(scoring.InputExample(**row), reply)
            loose = scoring.test_instruction_following_loose(scoring.InputExample(**row), reply)
            found = scores_of(scoring, row, reply)
            assert found["prompt_level_strict_acc"] == strict.follow_all_instructions
            assert found["inst_level_strict_acc"] == strict.follow_instruction_list
            assert found["prompt_level_loose_acc"] == loose.follow_all_instructions
            assert found["inst_level_loose_acc"] == loose.follow_instruction_list


def test_the_same_reply_is_scored_alike_every_time():
    row = {**ROWS[1], "instruction_id_list": ["language:response_language"], "kwargs": [{"language": "it"}]}
    # an unseeded detector takes it for Italian or for Afrikaans, as it happens
    verdicts = [figures(row, "alle die") for _ in range(60)]
    assert len(set(map(str, verdicts))) == 1
    drawn = {"key": 9, "prompt": "x", "instruction_id_list": ["keywords:letter_frequency"]}
    drawn["kwargs"] = [{"let_relation": "at least", "letter": "#", "let_frequency": 1}]  # no letter: one is drawn
    random.seed(5)
    before = random.getstate()
    verdicts = {str(figures(drawn, "abcdefg")) for _ in range(20)}
    assert len(verdicts) == 1 and random.getstate() == before


def test_the_task_asks_and_judges(tmp_path):
    task = IfevalTask(str(write_jsonl(tmp_path / "a.jsonl", ROWS)))
    items = task.items(WordReader())
    assert [item.messages for item in items] == [({"role": "user", "content": row["prompt"]},) for row in ROWS]
    verdicts = {v.item: fakes.scores_of(v) for v in task.run(Says(lambda m: "TEA IS A WARM DRINK FOR ALL"), items)}
    assert [verdicts[item.id]["prompt strict"] for item in items] == [(True, 1)] * 3
    assert verdicts["0/1"]["instruction strict"] == (2, 2)
    assert verdicts["0/1"]["by instruction/punctuation:no_comma"] == (1, 1)
    assert (task.name, IfevalTask("x", system=True).name) == ("ifeval", "ifeval_system")


def test_the_system_form_takes_the_files_messages(tmp_path):
    messages = [{"role": "system", "content": "No commas."}, {"role": "user", "content": "Write about tea."}]
    task = IfevalTask(str(write_jsonl(tmp_path / "a.jsonl", [ROWS[0] | {"messages": messages}])), system=True)
    (item,) = task.items(WordReader())
    assert list(item.messages) == messages


BAD = {
    "no prompt": ({"prompt": None}, 'a.jsonl:2: "prompt" is NoneType, expected str'),
    "kwargs too few": ({"kwargs": [{}]}, "a.jsonl:2: 2 instructions with 1 kwargs"),
    "unknown instruction": (
        {"instruction_id_list": ["a:b", "c:d"]},
        "a.jsonl:2: unknown instruction 'a:b'; known: change_case",
    ),
    "kwargs of another": ({"kwargs": [{}, {"letter": "a"}]}, "a.jsonl:2: kwargs do not fit"),
    "kwargs no objects": ({"kwargs": [None, 3]}, "an object for each"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_broken_row_is_named(tmp_path, name):
    change, said = BAD[name]
    path = write_jsonl(tmp_path / "a.jsonl", [ROWS[0], ROWS[0] | change])
    with pytest.raises(UserError) as caught:
        IfevalTask(str(path)).items(WordReader())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_system_form_needs_messages(tmp_path):
    with pytest.raises(UserError, match=r'a\.jsonl:1: "messages" is nothing, expected list'):
        IfevalTask(str(write_jsonl(tmp_path / "a.jsonl", ROWS)), system=True).items(WordReader())


def test_a_hub_that_cannot_be_reached_is_one_line():
    with pytest.raises(UserError, match=r"hf:OWNER/NAME: cannot be fetched from the hub .*give its path") as caught:
        IfevalTask("hf:OWNER/NAME").items(WordReader())
    assert "\n" not in str(caught.value)


def test_nothing_is_downloaded(tmp_path):
    """In a process of its own, with no NLTK data anywhere and every connection refused."""
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('a connection')\n"
        "socket.socket.connect = socket.create_connection = refuse\n"
        "from calyrex_jax.evals.tasks.ifeval import judge\n"
        "import json, sys\n"
        "row = json.loads(sys.argv[1])\n"
        "print([bool(s.total) for s in judge(row, 'Dr. Smith met Mr. Jones in the hall. They talked.')][:4])\n"
    )
    places = {"HOME": str(tmp_path), "NLTK_DATA": str(tmp_path / "none"), "CALYREX_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(ROWS[2])],
        env=os.environ | places | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "[True, True, True, True]", done.stderr
    assert "download" not in (done.stdout + done.stderr).lower()


def test_the_real_files():
    place = Path(os.environ.get("CALYREX_TEST_DATA", "")) / "ifeval"
    if not (place / "input_data.jsonl").exists():
        pytest.skip(
            "no IFEval files: set CALYREX_TEST_DATA to a directory with ifeval/input_data.jsonl and sys_ifeval.jsonl"
        )
    plain = IfevalTask(str(place / "input_data.jsonl")).items(WordReader())
    system = IfevalTask(str(place / "sys_ifeval.jsonl"), system=True).items(WordReader())
    assert len(plain) == len(system) == 541
    assert sum(len(item.detail["kwargs"]) for item in plain) == 834
    assert all(item.messages[0]["role"] == "system" for item in system)
