"""Figures and paired differences from verdicts, and journals that keep exactly what still holds."""

import json
from dataclasses import dataclass

import numpy as np
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.evals import stats, study
from calyrex_jax.evals.journal import Journal, verdict_key
from calyrex_jax.evals.tasks.api import Item, Score, Verdict, judged
from calyrex_jax.metrics import Metrics
from tests.evals.fakes import Says


def verdicts(cell, totals, counts=None, kind="rate"):
    counts = counts or [1.0] * len(totals)
    return {str(i): Verdict(str(i), (Score(cell, t, c, kind),), {}) for i, (t, c) in enumerate(zip(totals, counts))}


def test_a_rate_over_single_tries_gets_wilsons_interval():
    found = study.cells(verdicts("a", [True, True, True, False]).values())
    assert found == {"a": stats.rate([True, True, True, False])}


def test_instructions_of_one_prompt_are_resampled_together():
    figure = study.cells(verdicts("a", [1, 2, 0], [1, 3, 1]).values())["a"]
    assert (figure.n, figure.value, figure.percent) == (3, 3 / 5, True)
    assert figure == stats.ratio([1, 2, 0], [1, 3, 1], percent=True)


def test_means_and_perplexities():
    assert study.cells(verdicts("a", [3, 5], kind="mean").values())["a"].value == 4.0
    found = study.cells(verdicts("a", [2 * np.log(0.5), np.log(0.5)], [2, 1], "perplexity").values())["a"]
    np.testing.assert_allclose(found.value, 2.0)


def test_differences_are_paired_over_the_same_items():
    before, after = verdicts("a", [0, 0, 1, 1]), verdicts("a", [1, 1, 1, 0])
    del after["0"]
    figure = study.compared(before, after)["a"]
    assert (figure.n, figure.value, figure.percent) == (3, 0.0, True)
    assert (figure.low, figure.high) == (-1.0, 1.0)
    assert study.compared(before, verdicts("b", [1])) == {}


def test_rates_that_agree_everywhere_do_not_claim_certainty():
    same = verdicts("a", [1, 0, 1, 0])
    figure = study.compared(same, same)["a"]
    assert figure.value == 0 and figure.low < 0 < figure.high
    assert figure == stats.paired_rate_difference([1, 0, 1, 0], [1, 0, 1, 0])
    assert study.compared(verdicts("a", [0, 0]), verdicts("a", [1, 1]))["a"].low < 1


def test_the_difference_of_perplexities_is_their_ratio():
    before = verdicts("p", [-4.0, -8.0], [2, 4], "perplexity")
    after = verdicts("p", [-5.0, -10.0], [2, 4], "perplexity")
    np.testing.assert_allclose(study.compared(before, after)["p"].value, np.exp(3 / 6))


# Running


@dataclass(frozen=True)
class Shout:
    limit: int = 0
    loud: str = "A"
    name = "shout"
    headline = "loud"
    about = "x"
    new_tokens = 4

    def run(self, ask, items):
        return judged(self, ask, items)

    def judge(self, item, reply):
        return (Score("loud", reply.startswith(self.loud)),)


ITEMS = [Item(str(i), ({"role": "user", "content": f"say {i}"},), {"i": i}) for i in range(6)]


def subject(name, ask, digest="d"):
    return study.Subject(name, digest, lambda advance: ask)


def run(tmp_path, *subjects, task=None, items=ITEMS):
    task = task or Shout()
    return study.run([task], {task.name: items}, subjects, tmp_path, Metrics(tmp_path, tensorboard=False))


def test_every_verdict_is_written_with_what_an_audit_needs(tmp_path):
    found = run(tmp_path, subject("up", Says(lambda m: "A" + m[-1]["content"])), subject("frozen", Says(lambda m: "b")))
    assert found.figures["shout"]["up"]["loud"] == stats.rate([1] * 6)
    assert list(found.differences["shout"]) == ["up - frozen"]
    assert found.differences["shout"]["up - frozen"]["loud"].value == 1.0
    rows = [json.loads(line) for line in (tmp_path / "shout.up.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == list("543210")  # as they were made
    assert rows[0]["messages"] == [{"role": "user", "content": "say 5"}]
    assert rows[0]["said"] == {"reply": "Asay 5", "finish_reason": "stop"}
    assert rows[0]["detail"] == {"i": 5} and rows[0]["scores"] == [["loud", 1.0, 1.0, "rate"]]


def test_finished_verdicts_are_kept_and_only_the_rest_is_asked(tmp_path, capsys):
    run(tmp_path, subject("m", Says(lambda m: "A")), items=ITEMS[:4])
    with (tmp_path / "shout.m.jsonl").open("a") as file:
        file.write('{"key": "cut sho')  # killed while it wrote
    ask = Says(lambda m: "b")
    found = run(tmp_path, subject("m", ask))
    assert [m[-1]["content"] for m in ask.asked] == ["say 4", "say 5"]
    assert found.figures["shout"]["m"]["loud"].value == 4 / 6
    assert "4 of 6 verdicts kept" in capsys.readouterr().err
    assert len((tmp_path / "shout.m.jsonl").read_text().splitlines()) == 6
    again = Says(lambda m: "never")
    assert run(tmp_path, subject("m", again)) == found
    assert again.asked == []


def test_a_smaller_limit_throws_nothing_away(tmp_path):
    run(tmp_path, subject("m", Says(lambda m: "A")))
    run(tmp_path, subject("m", Says(lambda m: "A")), items=ITEMS[:2], task=Shout(limit=2))
    ask = Says(lambda m: "A")
    run(tmp_path, subject("m", ask))
    assert ask.asked == []


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("another model", {"subject": "e"}),
        ("another setting", {"task": Shout(loud="B")}),
        ("another item under the same name", {"items": [Item("0", ({"role": "user", "content": "other"},), {"i": 0})]}),
    ],
)
def test_what_no_longer_holds_is_asked_again(tmp_path, what, change):
    run(tmp_path, subject("m", Says(lambda m: "A")))
    ask = Says(lambda m: "A")
    run(tmp_path, subject("m", ask, change.get("subject", "d")), task=change.get("task"), items=change.get("items", ITEMS))
    assert len(ask.asked) == len(change.get("items", ITEMS)), what


def test_an_interrupted_run_keeps_what_it_wrote(tmp_path):
    class Stop(Exception):
        pass

    class Dies(Says):
        def generate(self, conversations, max_new_tokens):
            for count, made in enumerate(super().generate(conversations, max_new_tokens)):
                if count == 2:
                    raise Stop
                yield made

    with pytest.raises(Stop):
        run(tmp_path, subject("m", Dies(lambda m: "A")))
    ask = Says(lambda m: "A")
    run(tmp_path, subject("m", ask))
    assert [m[-1]["content"] for m in ask.asked] == ["say 0", "say 1", "say 2", "say 3"]


def test_a_score_that_is_not_finite_is_refused(tmp_path):
    journal = Journal.open(tmp_path / "a.jsonl", "d")
    with pytest.raises(UserError, match="not finite"):
        journal.add("k", "d", ITEMS[0], Verdict("0", (Score("p", float("nan"), 1, "perplexity"),), {}))


def test_the_limit_alone_does_not_change_a_key():
    assert verdict_key(Shout(limit=1), ITEMS[0], "d") == verdict_key(Shout(), ITEMS[0], "d")
    others = {verdict_key(Shout(loud="B"), ITEMS[0], "d"), verdict_key(Shout(), ITEMS[1], "d")}
    assert verdict_key(Shout(), ITEMS[0], "d") not in others | {verdict_key(Shout(), ITEMS[0], "e")}
