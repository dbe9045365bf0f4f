"""--mode=eval on a tiny model: report, verdicts, reuse, adapters of other runs, and what a user can get wrong."""

import json
import os
import signal

import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import build, checkpoint, evaluate
from calyrex_jax.config import as_dict
from calyrex_jax.core.errors import UserError
from calyrex_jax.data import chat, rules
from calyrex_jax.evals.ask import ChatReader, ModelAsk, generate_together, rows_for
from calyrex_jax.evals.journal import Journal
from calyrex_jax.generate import loop, score
from tests import tiny, tiny_runs
from tests.tiny_runs import conversation, make_config

pytestmark = pytest.mark.usefixtures("own_signals")

SHORT = {"eval__limit": 2, "eval__max_new_tokens": 4, "eval__batch_size": 4}


def save(root, name, size, **changes):
    config = make_config(root / "model", **changes)
    moved = tiny.perturbed(build.fresh_adapters(build.open_run(config)), size=size)
    saved = checkpoint.Checkpoints(root / name / "checkpoints", keep=1, config=as_dict(config))
    saved.save(3, moved, {"nothing": jnp.zeros(1)}, {})
    saved.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """model/, and the runs trained/, other/ (another placement and block) and foreign/ (another backbone)."""
    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    root = tmp_path_factory.mktemp("evaluate")
    tiny_runs.write_model(root / "model", max_position_embeddings=4096)
    save(root, "trained", 0.3)
    save(root, "other", 0.2, adapter__placement="2", cal__mlp_dim=8, cal__rope=True)
    (root / "elsewhere").mkdir()
    tiny_runs.write_model(root / "elsewhere" / "another", seed=1)
    config = make_config(root / "elsewhere" / "another")
    saved = checkpoint.Checkpoints(root / "foreign" / "checkpoints", keep=1, config=as_dict(config))
    saved.save(1, build.fresh_adapters(build.open_run(config)), {"nothing": jnp.zeros(1)}, {})
    saved.close()
    yield root
    tiny_runs.forget_compilations()


def run(place, workdir, tasks="rules", **changes):
    config = make_config(place / "model", **(SHORT | {"eval__tasks": tasks} | changes))
    assert evaluate.evaluate(config, str(place / workdir)) == 0
    return json.loads((place / workdir / "report.json").read_text())


def verdicts(place, workdir, name):
    path = place / workdir / "eval" / f"{name}.jsonl"
    return {row["id"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


@pytest.mark.slow
def test_two_adapters_and_the_frozen_model(place, capsys):
    (place / "both").mkdir()
    (place / "both" / "report.json").write_text('{"steps": 7, "tasks": "old"}')
    compare = f"cal={place / 'trained'},other={place / 'other'}"
    how = {"eval__compare": compare, "eval__turns": 2, "eval__limit": 1}
    report = run(place, "both", "rules,turns", **how)
    said = capsys.readouterr()
    assert "comparing cal, other alone" in said.err
    assert report["steps"] == 7, "what training wrote stays"
    assert report["model"] == "cal" and list(report["models"]) == ["cal", "other", "frozen"]
    assert list(report["compare"]) == ["cal - other", "cal - frozen", "other - frozen"]
    for task, headline in (("rules", "adherence"), ("turns", "turns until the first breach")):
        figure = report["tasks"][task]
        assert {"n", "value", "low", "high", "cells"} == set(figure)
        assert {k: figure[k] for k in ("n", "value", "low", "high")} == figure["cells"][headline]
        assert report["compare"]["cal - frozen"][task]["n"] == figure["n"]
        assert (place / "both" / "eval" / f"{task}.other.jsonl").exists()
    html = (place / "both" / "report.html").read_text()
    assert "<svg" in html and "http" not in html.replace("http://www.w3.org", "")
    assert "turns: turn 2" in said.out

    # and the same command asks nothing again
    before = {path: path.read_bytes() for path in (place / "both" / "eval").iterdir()}
    assert run(place, "both", "rules,turns", **how) == report
    assert {path: path.read_bytes() for path in (place / "both" / "eval").iterdir()} == before
    assert capsys.readouterr().err.count("verdicts kept from") == 6


@pytest.mark.slow
def test_conflict_and_long_context(place):
    how = {"eval__context_lengths": "0,300", "eval__shots": "0,2", "eval__limit": 1, "adapter__name": "prompt_only"}
    report = run(place, "bare", "long_context,conflict", **how)
    assert {"adherence", "0 tokens", "300 tokens"} < set(report["tasks"]["long_context"]["cells"])
    assert {"attack success", "drop", "reveal, 2 shots", "replace, no attack"} < set(report["tasks"]["conflict"]["cells"])
    assert report["tasks"]["conflict"]["n"] == 6


def test_the_frozen_model_and_one_as_initialised_agree_and_are_the_backbone(place, capsys):
    report = run(place, "fresh", "perplexity")
    assert "no checkpoint in" in capsys.readouterr().err
    assert report["models"]["cal"] == report["models"]["frozen"]
    assert report["compare"]["cal - frozen"]["perplexity"]["value"] == 1.0

    opened = build.open_run(make_config(place / "model", adapter__name="prompt_only"))
    examples = [chat.encode(opened.tokenizer, c["messages"]) for c in rules.plain_chats()[::30]]
    params = {"backbone": build.load_weights(opened), "adapters": {}}
    lines = score.scores(opened.model, params, examples, pad_id=0)
    expected = score.perplexity(lines, [e.targets for e in examples])
    np.testing.assert_allclose(report["tasks"]["perplexity"]["value"], expected, rtol=1e-5)

    bare = run(place, "bare", "perplexity", adapter__name="prompt_only")
    assert list(bare["models"]) == ["frozen"] and bare["compare"] == {}
    np.testing.assert_allclose(bare["tasks"]["perplexity"]["value"], expected, rtol=1e-5)


def test_replies_are_those_of_greedy_generation_with_the_checkpoint(place):
    report = run(place, "trained", "rules")
    opened = build.open_run(make_config(place / "model"))
    params = {"backbone": build.load_weights(opened), "adapters": build.trained_adapters(opened, place / "trained")}
    rows = verdicts(place, "trained", "rules.cal")
    frozen = verdicts(place, "trained", "rules.frozen")
    prompts = [chat.encode(opened.tokenizer, row["messages"], for_generation=True) for row in rows.values()]
    replies = loop.generate(
        opened.model, params, prompts, max_new_tokens=4, stop_ids=opened.stop_ids, pad_id=0, batch_size=1
    )
    assert [row["said"]["reply"] for row in rows.values()] == [opened.tokenizer.decode(r.text_tokens) for r in replies]
    assert rows.keys() == frozen.keys()
    assert any(rows[i]["said"] != frozen[i]["said"] for i in rows)
    # every line, judged again from what it holds, gives the figures
    items = {item.id: item for item in rules.evaluation_set()}
    follows = [rules.check(items[i], row["said"]["reply"]).follows for i, row in rows.items() if items[i].constraints]
    assert report["tasks"]["rules"]["value"] == sum(follows) / len(follows)


def test_a_change_of_the_checkpoint_is_noticed(place, tmp_path, capsys):
    save(place, "grows", 0.3)
    run(place, "grows", "perplexity")
    saved = checkpoint.Checkpoints(place / "grows" / "checkpoints", keep=1, config=as_dict(make_config(place / "model")))
    moved = tiny.perturbed(build.fresh_adapters(build.open_run(make_config(place / "model"))), size=0.1)
    saved.save(4, moved, {"nothing": jnp.zeros(1)}, {})
    saved.close()
    capsys.readouterr()
    run(place, "grows", "perplexity")
    said = capsys.readouterr().err
    assert "perplexity, frozen: 3 of 3 verdicts kept" in said or "perplexity, frozen: 2 of 2" in said
    assert "perplexity, cal: " not in said


def test_plain_conversations_of_the_user(place, tmp_path):
    rows = [conversation("Who?", "Nobody at all.", "Be brief"), conversation("Again?", "Yes", None)]
    path = tiny_runs.write_jsonl(tmp_path / "chats.jsonl", rows)
    report = run(place, "users", "perplexity", eval__data=str(path), eval__limit=0)
    assert report["tasks"]["perplexity"]["n"] == 2
    tokens = [row["said"]["tokens"] for row in verdicts(place, "users", "perplexity.cal").values()]
    assert sorted(tokens) == [len("Yes") + 1, len("Nobody at all.") + 1]


# Batching


def test_models_that_share_layers_answer_as_each_alone(place):
    """CAL of two shapes and the frozen model begin at different boundaries or the same; the replies are the same anyway."""
    asks, reader = {}, None
    for name, changes in {
        "cal": {},
        "rope": {"cal__rope": True},
        "other": {"adapter__placement": "1", "cal__mlp_dim": 8},
    }.items():
        opened = build.open_run(make_config(place / "model", **changes))
        reader = reader or ChatReader(opened.tokenizer, opened.policy, 4096)
        moved = tiny.perturbed(build.fresh_adapters(opened), size=0.3)
        params = {"backbone": build.load_weights(opened), "adapters": moved}
        asks[name] = ModelAsk(reader, opened.model, params, opened.stop_ids, 3, 600)
    chats = [conversation("Who are you? " * n, None, "Be brief")["messages"] for n in (1, 20, 2)]
    together = dict(generate_together(asks, chats, 5))
    assert sorted(together) == list(range(3))
    for name, ask in asks.items():
        assert {i: answers[name] for i, answers in together.items()} == dict(ask.generate(chats, 5))
    assert any(len({answer.text for answer in answers.values()}) > 1 for answers in together.values())
    elsewhere = build.open_run(make_config(place / "model", adapter__placement="2"))
    params = {"backbone": params["backbone"], "adapters": build.fresh_adapters(elsewhere)}
    asks["late"] = ModelAsk(reader, elsewhere.model, params, opened.stop_ids, 3, 600)
    with pytest.raises(ValueError, match="one first boundary"):
        list(generate_together(asks, chats, 5))


def test_long_conversations_get_fewer_rows(place):
    opened = build.open_run(make_config(place / "model", adapter__name="prompt_only"))
    params = {"backbone": build.load_weights(opened), "adapters": {}}
    reader = ChatReader(opened.tokenizer, opened.policy, 4096)
    counted = []
    ask = ModelAsk(reader, opened.model, params, opened.stop_ids, 4, 256, counted.append)
    texts = ["a" * n for n in (10, 300, 20, 30, 40, 50)]
    found = list(ask.generate([[{"role": "user", "content": text}] for text in texts], 3))
    assert found[0][0] == 1 and sorted(index for index, _ in found) == list(range(6))
    assert counted[0] == 1 and sum(counted) == 6
    alone = dict(
        ModelAsk(reader, opened.model, params, opened.stop_ids, 1, 1).generate(
            [[{"role": "user", "content": t}] for t in texts], 3
        )
    )
    assert dict(found) == alone
    assert [rows_for(n, 64, 4096) for n in (10, 64, 65, 100, 4097)] == [64, 64, 32, 32, 1]


# What a user can get wrong


def refused(place, workdir="trained", **changes):
    with pytest.raises(UserError) as caught:
        evaluate.evaluate(make_config(place / "model", **(SHORT | changes)), str(place / workdir))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eval__tasks": "rules,nonsense"}, "unknown task 'nonsense'; known: rules, "),
        ({"eval__tasks": ""}, "known: rules, "),
        ({"eval__data": "x.jsonl"}, "none of them does"),
        ({"eval__tasks": "perplexity", "eval__data": "no/x.jsonl"}, "no/x.jsonl: cannot be read"),
        ({"eval__tasks": "long_context", "eval__context_lengths": "0,9000"}, "the backbone has 4096 positions"),
        ({"eval__tasks": "long_context", "eval__context_lengths": "far"}, "config.eval.context_lengths is 'far'"),
        ({"eval__tasks": "long_context", "eval__filler": "noise"}, "config.eval.filler is 'noise'"),
        ({"eval__tasks": "turns", "eval__turns": 100}, "eval task turns: 100 turns"),
        ({"eval__tasks": "conflict", "eval__shots": "0,500"}, "expected whole numbers from 0 to 128"),
        ({"eval__turns": 0}, "config.eval.turns is 0"),
        ({"eval__compare": "cal"}, "config.eval.compare: 'cal' is not understood"),
        ({"eval__compare": "frozen=x"}, "none of them frozen"),
        ({"eval__compare": "a=nowhere"}, "no finished checkpoint"),
        ({"cal__rope": True}, "config.cal.rope was False and is True"),
        ({"adapter__placement": "2"}, "does not fit the adapter of this config"),
    ],
)
def test_one_clear_line(place, changes, said):
    assert said in refused(place, **changes)


def test_a_user_file_without_replies(place, tmp_path):
    path = tiny_runs.write_jsonl(tmp_path / "chats.jsonl", [conversation("Who?", "Me"), conversation("Who?")])
    said = refused(place, eval__tasks="perplexity", eval__data=str(path))
    assert "chats.jsonl:2: the last message is no reply" in said


def test_an_adapter_of_another_backbone(place):
    said = refused(place, "unused", eval__compare=f"far={place / 'foreign'}")
    assert "was trained for another backbone: config.backbone.source was" in said and "another" in said


def test_sigterm_keeps_the_verdicts_and_returns_143(place, monkeypatch, capsys):
    add = Journal.add

    def killed(self, *args):
        add(self, *args)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Journal, "add", killed)
    how = {**SHORT, "eval__batch_size": 1, "eval__tasks": "perplexity", "adapter__name": "prompt_only"}
    assert evaluate.evaluate(make_config(place / "model", **how), str(place / "killed")) == 143
    assert "the same command goes on from there" in capsys.readouterr().err
    assert len(verdicts(place, "killed", "perplexity.frozen")) == 1
    assert not (place / "killed" / "report.json").exists()
    monkeypatch.undo()
    assert run(place, "killed", "perplexity", **how)["tasks"]["perplexity"]["n"] == 2
    assert "1 of 2 verdicts kept" in capsys.readouterr().err


def test_main_dispatches(place):
    config = make_config(place / "model", eval__tasks="nonsense")
    done = tiny_runs.command(*tiny_runs.arguments(config, place / "main", "eval"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: config.eval.tasks is 'nonsense'")
    assert not (place / "main").exists()
