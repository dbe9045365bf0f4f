"""The three stages on a tiny model: order, resuming, what is trained when, and what a user can get wrong."""

import json
import signal

import jax
import numpy as np
import pytest

from calyrex_jax import build, curriculum, evaluate, fit, infer, train
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.data import labelled, labelled_types
from calyrex_jax.data.prefix_store import PrefixStore
from calyrex_jax.training import dialogues
from calyrex_jax.training.svgt import prefix_scores
from tests import tiny_runs

pytestmark = pytest.mark.usefixtures("own_signals")


def rows(count=24):
    """Replies that are harmful where prompt and reply name the same letter."""
    for i in range(count):
        for bad in (0, 1):
            letter = "abcdefgh"[i % 8]
            other = letter if bad else "abcdefgh"[(i + 3) % 8]
            yield {"prompt": f"keep {letter}" + " now" * (i % 3), "response": f"{other} said {i}", "label": bad}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("curriculum")
    tiny_runs.keep_compilations(root / "compiled")
    tiny_runs.write_model(root / "model", num_hidden_layers=3)
    tiny_runs.write_jsonl(root / "pairs.jsonl", rows())
    yield root
    tiny_runs.forget_compilations()


@pytest.fixture(scope="module")
def config(place):
    def make(**changes):
        config = tiny_runs.make_config(place / "model", adapter__name="prompt_only", generate__max_new_tokens=7)
        config.svgt.update(
            {"enabled": True, "layer": 0, "value_dim": 8, "num_heads": 2, "num_bridge_tokens": 2, "refresh_every": 3}
        )
        config.svgt.update({"data": str(place / "pairs.jsonl"), "validation": 0.25, "max_length": 128})
        for stage in (1, 2, 3):
            config.svgt[f"stage{stage}"].update({"epochs": 2, "batch_size": 8, "learning_rate": 5e-3})
        for field, value in changes.items():
            config.svgt[field] = value
        return config

    return make


@pytest.fixture(scope="module")
def straight(place, config):
    assert curriculum.train(config(), str(place / "straight")) == 0
    return place / "straight"


def losses(directory):
    """Of every step; what validation logged is left out."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line]


def leaves(config, directory, stage):
    run = build.open_run(config)
    like = {"svgt": build.fresh_adapters(run)["svgt"]}
    saved = build.checkpoint.Checkpoints(directory / f"stage{stage}" / "best", keep=None, config=build.as_dict(config))
    return trees.flatten(jax.device_get(saved.restore_trainable(like)[1]["svgt"]))


@pytest.mark.slow
def test_each_stage_trains_its_own_parts_and_is_reported(straight, config):
    report = json.loads((straight / "report.json").read_text())
    assert report["backbone_unchanged"] and set(report) >= {"stage1", "stage2", "stage3", "wall_seconds"}
    for stage in (1, 2):
        assert set(report[f"stage{stage}"]["validation"]) == {"accuracy", "f1", "auroc", "ece"}
        assert report[f"stage{stage}"]["steps"] == 10  # 36 pairs in batches of 8, twice
    assert set(report["stage3"]["validation"]) >= {"loss", "ce", "safety", "regulariser", "norm_ratio", "gate"}
    first, second, third = (leaves(config(), straight, stage) for stage in (1, 2, 3))

    def moved(a, b):
        return {path.split("/")[1] for path in a if not np.array_equal(a[path], b[path])}

    assert moved(first, second) >= {"conditional", "discriminator", "response"}
    assert {path.split("/")[0] for path in first if not np.array_equal(first[path], second[path])} == {"value_space"}
    assert {path.split("/")[0] for path in third if not np.array_equal(third[path], second[path])} == {"bridge"}
    lines = [json.loads(line) for line in (straight / "stage3/metrics.jsonl").read_text().splitlines()]
    assert {"loss", "ce", "safety", "gate", "norm_ratio"} <= set(lines[0])


@pytest.mark.slow
def test_without_the_cache_the_losses_are_the_same(straight, config, tmp_path):
    assert curriculum.train(config(cache="off"), str(tmp_path)) == 0
    for stage in (1, 2, 3):
        with_cache, without = (losses(where / f"stage{stage}") for where in (straight, tmp_path))
        np.testing.assert_allclose(with_cache[0], without[0], rtol=1e-4)
        np.testing.assert_allclose(with_cache, without, rtol=1e-2)  # ten steps of a high rate magnify the last digits


@pytest.mark.slow
def test_a_stopped_stage_goes_on_as_if_nothing_had_been(straight, config, tmp_path, monkeypatch, stage=2):
    taken = curriculum._Runner.step

    def stopped(self, state, corpus, indices, number):
        if self.stage == stage and number == 3:
            signal.raise_signal(signal.SIGTERM)
        return taken(self, state, corpus, indices, number)

    with monkeypatch.context() as patch:
        patch.setattr(curriculum._Runner, "step", stopped)
        assert curriculum.train(config(), str(tmp_path)) == 143
    assert not (tmp_path / "report.json").exists()
    assert curriculum.train(config(), str(tmp_path)) == 0
    for number in (stage, 3):
        assert losses(tmp_path / f"stage{number}") == losses(straight / f"stage{number}")
    for path, leaf in leaves(config(), tmp_path, 3).items():
        np.testing.assert_array_equal(leaf, leaves(config(), straight, 3)[path], err_msg=path)


@pytest.mark.slow
def test_one_stage_alone_starts_from_the_one_before(straight, config, tmp_path):
    alone = config(stages="3")
    with pytest.raises(UserError, match=r"stage 3 starts from stage 2, but .* has no finished one"):
        curriculum.train(alone, str(tmp_path))
    alone.adapter.init_from = f"svgt={straight}"
    assert curriculum.train(alone, str(tmp_path)) == 0
    before, behind = leaves(config(), straight, 2), leaves(config(), tmp_path, 3)
    for path in before:
        if path.startswith("value_space"):
            np.testing.assert_array_equal(before[path], behind[path], err_msg=path)


@pytest.mark.slow
def test_generate_tells_the_harm_probability(straight, config, tmp_path):
    source = tiny_runs.write_jsonl(
        tmp_path / "in.jsonl", [tiny_runs.conversation(text) for text in ("keep a", "b?", "now c")]
    )
    assert infer.run(config(), str(straight), "generate", str(source), str(tmp_path / "out.jsonl")) == 0
    for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert len(line["harm"]) == 1 + max(len(line["tokens"]) - 1, 0) // 3
        assert all(0 <= value <= 1 for value in line["harm"])
    off = config(enabled=False)
    assert infer.run(off, str(straight), "generate", str(source), str(tmp_path / "plain.jsonl")) == 0
    assert "harm" not in json.loads((tmp_path / "plain.jsonl").read_text().splitlines()[0])


@pytest.mark.slow
def test_score_is_that_of_the_guided_reply(straight, config, tmp_path):
    chats = [tiny_runs.conversation("keep a", "a said 3"), tiny_runs.conversation("b?")]
    source = tiny_runs.write_jsonl(tmp_path / "in.jsonl", chats)
    found = {}
    for enabled in (True, False):
        assert infer.run(config(enabled=enabled), str(straight), "score", str(source), str(tmp_path / "out.jsonl")) == 0
        found[enabled] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    guided, plain = (np.array(found[enabled][0]["logprobs"][1:]) for enabled in (True, False))
    reply = np.array(found[True][0]["target_mask"][1:], bool)
    start = reply.argmax()
    np.testing.assert_array_equal(guided[:start], plain[:start])
    assert np.abs(guided[start:] - plain[start:]).min() > 1e-6
    assert found[True][1] == found[False][1]  # no reply, no guidance


@pytest.mark.slow
def test_cal_and_svgt_trained_apart_work_together(place, straight, config, tmp_path):
    tiny_runs.write_corpus(tmp_path / "chats.jsonl", 6)
    alone = tiny_runs.make_config(place / "model", tmp_path / "chats.jsonl", train__steps=2, train__batch_size=2)
    assert train.train(alone, str(tmp_path / "cal")) == 0
    both = config()
    both.adapter.update({"name": "cal", "placement": alone.adapter.placement})
    both.cal.mlp_dim = alone.cal.mlp_dim
    both.adapter.init_from = f"cal={tmp_path / 'cal'},svgt={straight}"
    run = build.open_run(both)
    tree = build.trained_adapters(run, tmp_path / "both")
    assert set(tree) == {"cal", "svgt"}
    for path, leaf in leaves(config(), straight, 3).items():
        np.testing.assert_array_equal(trees.flatten(tree["svgt"])[path], leaf)
    assert float(jax.numpy.abs(tree["cal"]["boundary_1"]["w_o"]).max()) > 0
    chats = [tiny_runs.conversation("keep a", system="Be brief"), tiny_runs.conversation("b?")]
    source = tiny_runs.write_jsonl(tmp_path / "in.jsonl", chats)
    assert infer.run(both, str(tmp_path / "both"), "generate", str(source), str(tmp_path / "out.jsonl")) == 0
    for line in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()):
        assert len(line["harm"]) == 1 + max(len(line["tokens"]) - 1, 0) // 3
    both.eval.update({"tasks": "perplexity", "limit": 3, "batch_size": 3})
    assert evaluate.evaluate(both, str(tmp_path / "both")) == 0
    assert set(json.loads((tmp_path / "both/report.json").read_text())["models"]) == {"cal+svgt", "frozen"}
    both.cal.keys_from = "all"
    with pytest.raises(UserError, match=r"config\.cal\.keys_from=all cannot be guided"):
        build.open_run(both)


@pytest.mark.slow
def test_eval_compares_the_guided_model_with_the_watched_frozen_one(straight, config, tmp_path):
    settings = config()
    settings.eval.update({"tasks": "privacy,perplexity", "limit": 6, "max_new_tokens": 7, "batch_size": 3})
    settings.eval.compare = f"steered={straight}"
    assert evaluate.evaluate(settings, str(tmp_path / "run")) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert set(report["models"]) == {"steered", "frozen"}
    lines = {}
    for name in ("steered", "frozen"):
        kept = (tmp_path / f"run/eval/privacy.{name}.jsonl").read_text().splitlines()
        lines[name] = {line["id"]: line["said"] for line in map(json.loads, kept)}
        assert len(lines[name]) == 6 and all(len(said["harm"]) >= 1 for said in lines[name].values())
    assert report["models"]["steered"]["perplexity"]["value"] != report["models"]["frozen"]["perplexity"]["value"]
    plain = config(enabled=False)
    plain.eval.update({"tasks": "privacy,perplexity", "limit": 6, "max_new_tokens": 7, "batch_size": 3})
    assert evaluate.evaluate(plain, str(tmp_path / "plain")) == 0
    alone = json.loads((tmp_path / "plain/report.json").read_text())["models"]["frozen"]
    assert alone["perplexity"]["value"] == pytest.approx(report["models"]["frozen"]["perplexity"]["value"], rel=1e-6)
    for line in map(json.loads, (tmp_path / "plain/eval/privacy.frozen.jsonl").read_text().splitlines()):
        assert line["said"]["reply"] == lines["frozen"][line["id"]]["reply"] and "harm" not in line["said"]
    assert "harm probability" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_the_trained_value_space_judges_replies_of_any_model(place, straight, config, tmp_path):
    plain = config(enabled=False)
    plain.eval.update({"tasks": "privacy", "limit": 6, "max_new_tokens": 7, "batch_size": 3})
    plain.eval.scorer = f"svgt:{straight}"
    assert evaluate.evaluate(plain, str(tmp_path / "plain")) == 0
    run = build.open_run(config())
    svgt = {"svgt": build.trained_adapters(run, straight)["svgt"]}
    backbone = build.load_weights(run)
    lines = [json.loads(line) for line in (tmp_path / "plain/eval/privacy.frozen.jsonl").read_text().splitlines()]
    found, wanted = [], []
    for line in lines:
        asked = labelled_types.Labelled(tuple(line["messages"]), line["said"]["reply"], 0, "here")
        encoded = labelled.encode_labelled_corpus(run.tokenizer, [asked], run.policy, 4096, both=False)[0]
        talk = dialogues.assembled(encoded, 1)
        states = run.model.below({"backbone": backbone, "adapters": svgt}, talk)
        scores, mask = prefix_scores(run.model.svgt, svgt, dialogues.make_examples(talk, states, [0]))
        wanted.append(float(scores[0, int(mask[0].sum()) - 1] >= 0))
        found.append({name: total for name, total, *_ in line["scores"]})
    assert [scores.get("violations", scores.get("strayed")) for scores in found] == wanted
    plain.eval.scorer = f"svgt:{tmp_path / 'nowhere'}"
    with pytest.raises(UserError, match=r"config\.eval\.scorer: svgt:.*no finished checkpoint"):
        evaluate.evaluate(plain, str(tmp_path / "plain"))
    tiny_runs.write_corpus(tmp_path / "chats.jsonl", 6)
    alone = tiny_runs.make_config(place / "model", tmp_path / "chats.jsonl", train__steps=2, train__batch_size=2)
    assert train.train(alone, str(tmp_path / "cal")) == 0
    plain.eval.scorer = f"svgt:{tmp_path / 'cal'}"
    with pytest.raises(UserError, match=r"config\.eval\.scorer: svgt:.* has no value space \(cal\)"):
        evaluate.evaluate(plain, str(tmp_path / "plain"))


@pytest.mark.slow
def test_iti_is_computed_from_the_same_data_and_used_like_any_adapter(config, tmp_path):
    settings = config(enabled=False)
    settings.adapter.name, settings.iti.heads = "iti", 3
    assert fit.train(settings, str(tmp_path / "run")) == 0
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert len(report["heads"]) == 3 and report["backbone_unchanged"]
    source = tiny_runs.write_jsonl(tmp_path / "in.jsonl", [tiny_runs.conversation("keep a")])
    found = []
    for strength in (0.0, 30.0):
        settings.iti.strength = strength
        assert infer.run(settings, str(tmp_path / "run"), "score", str(source), str(tmp_path / "out.jsonl")) == 0
        found.append(json.loads((tmp_path / "out.jsonl").read_text())["logprobs"][1:])
    assert found[0] != found[1]


def test_plans_hold_every_example_once_and_depend_on_the_epoch():
    examples = [
        dialogues.EncodedLabelled(np.zeros(3 + i % 5, np.int32), np.zeros(3 + i % 5, bool), 2, i % 2) for i in range(21)
    ]
    first, again, other = (dialogues.plan(examples, 4, 7, epoch) for epoch in (0, 0, 1))
    assert first == again != other
    assert sorted(i for batch in first for i in batch) == sorted(i for batch in other for i in batch) == list(range(21))
    assert [len(batch) for batch in dialogues.plan_pass(examples, 8)] == [8, 8, 5]


def test_late_triggers_lie_within_the_reply():
    rng = np.random.default_rng(0)
    drawn = np.concatenate([dialogues.draw_triggers([1, 2, 9], 4, 0.5, rng)[None] for _ in range(200)])
    assert (drawn[:, 0] == 0).all() and (
        drawn[:, 3] == 0
    ).all()  # one token: nothing to place a trigger before; a filler row
    assert set(drawn[:, 1]) == {0, 1} and set(drawn[:, 2]) == set(range(9))
    assert 0.4 < (drawn[:, 2] > 0).mean() < 0.6
    assert (dialogues.draw_triggers([5], 1, 0.0, rng) == 0).all()


WRONG = {
    "stages": ({"stages": "1,4"}, r"config\.svgt\.stages is '1,4'"),
    "no data": ({"data": ""}, r"config\.svgt\.data is empty"),
    "unknown data": ({"data": "letters:x"}, r"'letters:x' is not understood"),
    "validation": ({"validation": 1.0}, r"config\.svgt\.validation is 1\.0"),
    "last layer": ({"layer": 2}, r"config\.svgt\.layer: 2 is the last of 3 layers"),
    "outside": ({"layer": 9}, r"config\.svgt\.layer: layer 9 lies outside the backbone"),
    "no bridge": ({"num_bridge_tokens": 0}, r"config\.svgt\.num_bridge_tokens: got 0"),
    "never": ({"refresh_every": 0}, r"config\.svgt\.refresh_every: got 0"),
    "too short": ({"max_length": 8}, r"raise the greatest length \(8\)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_user_can_get_wrong(config, tmp_path, case):
    changes, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        curriculum.train(config(**changes), str(tmp_path))


def test_texts_alone_serve_stage_1_only(config, tmp_path):
    texts = [{"text": f"text {i} {'bad' * (i % 2)}", "label": i % 2} for i in range(20)]
    source = tiny_runs.write_jsonl(tmp_path / "texts.jsonl", texts)
    with pytest.raises(UserError, match="stage 2 learns from prompts with replies, but it has texts alone"):
        curriculum.train(config(data=str(source)), str(tmp_path / "run"))


def test_states_are_stored_as_they_are_laid_out(tmp_path):
    examples = [
        dialogues.EncodedLabelled(np.arange(n, dtype=np.int32), np.zeros(n, bool), p, 0) for n, p in ((5, 2), (7, 4))
    ]
    store = PrefixStore.open(tmp_path, {}, [5, 7], 3, "float32", report=lambda line: None)
    states = [np.arange(n * 3, dtype=np.float32).reshape(n, 3) + 1 for n in (5, 7)]
    store.write([0, 1], states)
    corpus = dialogues.Corpus(examples, store)
    talk, found = dialogues.assembled(examples, 3), dialogues.stored_states(corpus, [0, 1], 3)
    mask = np.concatenate([talk.prompt_mask, talk.reply_mask], axis=1)
    for row, wanted in enumerate(states):
        np.testing.assert_array_equal(found[row][mask[row]], wanted)
        np.testing.assert_array_equal(np.concatenate([talk.prompt, talk.reply], 1)[row][mask[row]], examples[row].tokens)
    assert not mask[2].any() and not found[2].any()
    made = dialogues.make_examples(talk, found, [1.0, 0.0])
    np.testing.assert_array_equal(made.response[1][made.response_mask[1]], states[1][3:])  # from the last prompt position on
    np.testing.assert_array_equal(made.prompt[1][made.prompt_mask[1]], states[1][:4])
