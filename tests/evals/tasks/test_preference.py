"""What the preference task asks, and that its numbers are those of scoring both replies in full."""

import numpy as np
import pytest

from calyrex_jax import build
from calyrex_jax.data.rules_checks import Constraint, follows
from calyrex_jax.evals.ask import ChatReader, ModelAsk, prefer_together
from calyrex_jax.evals.tasks.long_context import place
from calyrex_jax.evals.tasks.preference import PreferenceTask, spread
from tests import tiny, tiny_runs
from tests.evals.fakes import WordReader, scores_of

READER = WordReader()


@pytest.fixture(scope="module")
def items():
    return PreferenceTask(lengths=(0, 200, 1500), shots=(0, 3, 20), limit=12, far_limit=4).items(READER)


def test_one_reply_follows_and_the_other_breaks_the_rule(items):
    for item in items:
        constraints = [Constraint(**c) for c in item.detail["constraints"]]
        assert follows(constraints, item.detail["follows"]) and not follows(constraints, item.detail["breaks"]), item.id
        if "replace" in item.id:
            assert follows([Constraint(**c) for c in item.detail["wanted"]], item.detail["breaks"])
    assert len({item.id for item in items}) == len(items)


def test_begin_and_end_are_as_many_and_far_ones_fewer(items):
    found = {}
    for item in items:
        key = item.detail["where"], place(item.judge.rule)
        found[key] = found.get(key, 0) + 1
    for at in ("begin", "end"):
        assert [found[f"{n} tokens", at] for n in (0, 200, 1500)] == [12, 12, 4]
        assert found["drop, 3 shots", at] == 12 and found["drop, 20 shots", at] == 4
        assert 4 <= found["replace, 3 shots", at] <= 12
    near = {item.id.partition("/")[2] for item in items if item.detail["where"] == "0 tokens"}
    assert {item.id.partition("/")[2] for item in items} == near, "far ones are among the near ones"


def test_there_are_two_hundred_items_of_either_sort():
    items = PreferenceTask(lengths=(0,), shots=(0,)).items(READER)
    at = [place(item.judge.rule) for item in items if item.detail["where"] == "0 tokens"]
    assert (at.count("begin"), at.count("end")) == (200, 200)
    assert len({(item.messages, item.detail["follows"]) for item in map(frozen, items)}) == len(items)
    assert sum("phrasings" in item.judge.cell for item in items if item.detail["where"] == "0 tokens") > 120


def frozen(item):
    """An item that can be compared by its messages."""
    return type(item)(item.id, tuple((m["role"], m["content"]) for m in item.messages), item.detail, item.judge)


def test_scores_by_cell(items):
    task = PreferenceTask()
    item = next(i for i in items if i.detail["where"] == "200 tokens" and i.judge.cell == "unseen_words_and_phrasings")
    found = scores_of(type("V", (), {"scores": task.prefers(item, -1.0, -3.0)}))
    at = place(item.judge.rule)
    assert found["200 tokens"] == found[f"200 tokens/{at}"] == found[f"200 tokens/new phrasings/{at}"] == (True, 1)
    assert found["200 tokens/new words"] == found["rule preferred"] == (True, 1)
    assert found["200 tokens/margin"] == found[f"200 tokens/margin/{at}"] == (2.0, 1)
    assert scores_of(type("V", (), {"scores": task.prefers(item, -3.0, -1.0)}))["200 tokens"] == (False, 1)


def test_curves_are_drawn_for_what_was_found(items):
    task = PreferenceTask(lengths=(0, 200), shots=(0, 3))
    titles = [curve.title for curve in task.curves(["0 tokens/end", "200 tokens/end", "drop, 0 shots/begin"])]
    assert titles == ["rules about the end"]


def test_items_that_do_not_fit_are_left_out():
    items = PreferenceTask(lengths=(0,), shots=(0, 60), limit=2).items(WordReader(700))
    assert {item.detail["where"] for item in items} == {"0 tokens", "drop, 0 shots", "replace, 0 shots"}


@pytest.mark.parametrize(("count", "expected"), [(4, [0, 2, 5, 7]), (10, list(range(10))), (20, list(range(10)))])
def test_spread(count, expected):
    assert spread(range(10), count) == expected


def test_preferences_are_those_of_scoring_both_replies(tmp_path):
    tiny_runs.write_model(tmp_path / "model", max_position_embeddings=4096)
    config = tiny_runs.make_config(tmp_path / "model")
    run = build.open_run(config)
    backbone = build.load_weights(run)
    reader = ChatReader(run.tokenizer, run.policy, 4096)
    items = PreferenceTask(lengths=(0,), shots=(1,), limit=1).items(reader)
    pairs = [PreferenceTask().pair(item) for item in items]

    def ask(seed):
        adapters = tiny.noise(build.fresh_adapters(run), seed, 0.2)
        return ModelAsk(reader, run.model, {"backbone": backbone, "adapters": adapters}, run.stop_ids, 3, 4000)

    asks = {"a": ask(1), "b": ask(2)}
    together = dict(prefer_together(asks, pairs))
    assert set(together) == set(range(len(pairs))) and len(pairs) > 4
    for name, one in asks.items():
        alone = dict(one.prefer(pairs))
        follow, broken = (dict(one.score([pair[side] for pair in pairs])) for side in (0, 1))
        for index in range(len(pairs)):
            first, second = follow[index], broken[index]
            size = min(len(first.tokens), len(second.tokens))
            at = int(np.flatnonzero(first.tokens[:size] != second.tokens[:size])[0])
            assert first.targets[at] and second.targets[at], "they part within the reply"
            plain = first.logprobs[at], second.logprobs[at]
            np.testing.assert_allclose(alone[index], plain, atol=2e-5)
            np.testing.assert_allclose(together[index][name], plain, atol=2e-5)
    assert together[0]["a"] != together[0]["b"]
