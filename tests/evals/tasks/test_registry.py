"""Tasks by name, their files, and comma-separated numbers."""

from dataclasses import replace

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.tasks import registry
from calyrex_jax.evals.tasks.api import numbers, thinned
from calyrex_jax.evals.tasks.lm_eval_tasks import Prompting

SETTINGS = registry.Settings(
    limit=3,
    seed=0,
    new_tokens=8,
    long_new_tokens=9,
    context_lengths="0,50",
    filler="turns",
    turns=2,
    shots="0,2",
    prompting=Prompting(),
    data={},
)


def test_tasks_get_their_settings_in_the_order_asked_for():
    turns, rules = registry.make_tasks("turns, rules", SETTINGS)
    assert (turns.name, turns.turns, turns.new_tokens) == ("turns", 2, 8)
    assert (rules.name, rules.limit) == ("rules", 3)


def test_safety_tasks_get_the_scorer():
    settings = replace(SETTINGS, data={"harmbench": "h.csv", "xstest": "x.csv"}, scorer="regex:a")
    tasks = registry.make_tasks("privacy,harmbench,xstest", settings)
    assert [task.scorer.pattern for task in tasks] == ["a"] * 3
    assert [task.new_tokens for task in tasks] == [8, 9, 8]
    assert registry.make_tasks("privacy", SETTINGS)[0].scorer is None
    with pytest.raises(UserError, match=r"config\.eval\.scorer is 'b'"):
        registry.make_tasks("privacy", replace(SETTINGS, scorer="b"))
    with pytest.raises(UserError, match="the task xstest needs its file"):
        registry.make_tasks("xstest", SETTINGS)


@pytest.mark.parametrize("names", ["nonsense", "rules,nonsense", "rules,rules", ""])
def test_an_unknown_or_repeated_task_lists_those_known(names):
    with pytest.raises(UserError, match=r"known: rules, .*conflict"):
        registry.make_tasks(names, SETTINGS)


def test_files_by_task():
    assert registry.parse_data("", "rules") == {}
    assert registry.parse_data("perplexity=a.jsonl", "rules,perplexity") == {"perplexity": "a.jsonl"}
    assert registry.parse_data("a.jsonl", "perplexity") == {"perplexity": "a.jsonl"}


@pytest.mark.parametrize("text", ["rules=a.jsonl", "a.jsonl", "perplexity=a.jsonl"])
def test_a_file_for_a_task_that_reads_none(text):
    with pytest.raises(UserError, match="none of them does"):
        registry.parse_data(text, "rules")


def test_numbers():
    assert numbers("2000, 0,500,0", "f", 0, 9999) == (0, 500, 2000)
    for text in ("", "a", "-1,5", "1,10000", "1.5"):
        with pytest.raises(UserError, match="f is"):
            numbers(text, "f", 0, 9999)


def test_thinned_meets_all_cells():
    assert thinned(list(range(10)), 0) == list(range(10))
    assert thinned(list(range(10)), 20) == list(range(10))
    assert thinned(list(range(100)), 4) == [0, 25, 50, 75]
