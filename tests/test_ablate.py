"""--mode=ablate on a tiny model: every placement trained, resumed, evaluated and compared; the plan's sizes and refusals.

Arms, learning curves and the sweep of rates are in test_arms.py.
"""

import json

import jax
import numpy as np
import pytest

from calyrex_jax import ablate, arms, build, makers, train
from calyrex_jax.adapters import cal
from calyrex_jax.backbones import named
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import default_config
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.data import sources
from calyrex_jax.training import sft
from tests import tiny_runs
from tests.data.in_memory import encode_corpus

SHORT = {
    "train__steps": 2,
    "eval__limit": 8,
    "eval__max_new_tokens": 3,
    "eval__batch_size": 8,
    "eval__tasks": "rules,perplexity",
}


def config_of(place, **changes):
    more = SHORT | {"ablate__placements": "last;1,2", "ablate__reference": "last", "ablate__seeds": 2} | changes
    return tiny_runs.make_config(place / "model", place / "chats.jsonl", data__prefix_cache="float32", **more)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    root = tmp_path_factory.mktemp("ablate")
    tiny_runs.write_model(root / "model", max_position_embeddings=4096)
    tiny_runs.write_corpus(root / "chats.jsonl")
    yield root
    tiny_runs.forget_compilations()


@pytest.mark.slow
def test_runs_are_compared_by_placement_and_kept(place, capsys):
    work = place / "work"
    assert ablate.ablate(config_of(place), str(work)) == 0
    report = json.loads((work / "report.json").read_text())
    rows = {row["placement"]: row for row in report["ablation"]}
    assert list(rows) == ["1,2", "last"] and rows["1,2"]["boundaries"] == [1, 2] and rows["last"]["boundaries"] == [2]
    assert rows["1,2"]["parameters"] == 2 * rows["last"]["parameters"], "all blocks alike"
    assert rows["last"]["seeds"] == [0, 1]
    one = json.loads((work / "last_s0" / "report.json").read_text())
    other = json.loads((work / "last_s1" / "report.json").read_text())
    assert rows["last"]["loss"] == pytest.approx((one["metrics"]["loss"] + other["metrics"]["loss"]) / 2)
    assert one["metrics"]["loss"] != other["metrics"]["loss"], "seeds differ"
    assert list(report["models"]) == ["last", "1,2", "frozen"] and report["model"] == "last"
    assert list(report["compare"]) == ["1,2 - last", "last - frozen"]
    judged = rows["last"]["cells"]["rules"]["adherence"]
    rows_of = [json.loads(line) for line in (work / "eval" / "rules.last_s0.jsonl").read_text().splitlines()]
    assert judged["n"] == sum(any(s[0] == "adherence" for s in map(cell_of, row["scores"])) for row in rows_of)
    html = (work / "report.html").read_text()
    assert html.count("<svg") >= 3 and "1,2 - last" in html
    # both boundaries' states are in one place; the higher ones were made from the lower
    assert len(list((work / "prefix").glob("*/index.json"))) == 2

    before = {path: path.stat().st_mtime_ns for path in work.glob("*_s*/checkpoints/*")}
    capsys.readouterr()
    assert ablate.ablate(config_of(place), str(work)) == 0
    said = capsys.readouterr().err
    assert said.count("finished earlier") == 4 and "verdicts kept" in said
    assert before == {path: path.stat().st_mtime_ns for path in work.glob("*_s*/checkpoints/*")}
    assert json.loads((work / "report.json").read_text())["ablation"] == report["ablation"]

    assert ablate.ablate(config_of(place, train__steps=3, ablate__seeds=1, eval__tasks="perplexity"), str(work)) == 0
    assert "finished earlier" not in capsys.readouterr().err, "more steps are trained, from the checkpoint on"


def cell_of(score):
    """(cell, …) of a score as journals hold it."""
    return (score["cell"],) if isinstance(score, dict) else score


def test_equal_parameters(place):
    found = arms.plan(config_of(place, ablate__match="parameters", cal__mlp_dim=0), spec_of(place), place / "nowhere")
    sizes = {arm.name: arm.parameters for arm in found}
    assert abs(sizes["1-2_s0"] / sizes["last_s0"] - 1) < 0.02, sizes
    assert [arm.name for arm in found] == ["1-2_s0", "1-2_s1", "last_s0", "last_s1"]
    assert not (place / "nowhere").exists(), "planning writes nothing"


def spec_of(place):
    return DecoderSpec.from_config(json.loads((place / "model" / "config.json").read_text()))


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen2.5-1.5B", "Llama-3.1-8B"])
@pytest.mark.parametrize("copying", [False, True])
def test_every_preset_matches_the_reference(model, copying, tmp_path):
    spec = named.named_spec(next(name for name in named.NAMED if model.lower() in name.lower()))
    config = default_config()
    config.ablate.match = "parameters"
    config.cal.copying = copying
    found = arms.plan(config, spec, tmp_path)
    assert len(found) == 8
    budget = makers.cal_budget(config, spec)
    for arm in found:
        assert abs(arm.parameters / budget - 1) < 0.01, (arm.name, arm.parameters, budget)


def test_a_budget_that_is_too_small_says_so():
    block = cal.CalConfig(embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=32, norm_eps=1e-5)
    with pytest.raises(UserError, match="leave nothing for their mlps"):
        cal.sized(block, 4, 4 * 4000)
    made = cal.sized(block, 2, 2 * 20000)
    adapter = cal.Cal(made, (1, 2))
    count = trees.count(jax.eval_shape(adapter.init, jax.random.key(0)))
    assert abs(count - 40000) <= 2 * 3 * 64, "as near as the mlp's width allows"


def test_fewer_heads_take_over_the_first_ones(place):
    config = config_of(place, cal__num_heads=2, cal__num_kv_heads=1, cal__init="layer", adapter__placement="1")
    run = build.open_run(config)
    backbone = build.load_weights(run)
    block = build.brought_adapters(run, backbone)["cal"]["boundary_1"]
    np.testing.assert_array_equal(block["w_q"], backbone["layers"]["attn"]["w_q"][1][:, :2])
    np.testing.assert_array_equal(block["w_k"], backbone["layers"]["attn"]["w_k"][1][:, :1])


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"ablate__placements": "last;nowhere"}, "neither a preset nor"),
        ({"ablate__placements": "last; last"}, "names a placement twice"),
        ({"adapter__name": "lora", "lora__rank": 1}, "moves blocks from boundary to boundary"),
        ({"adapter__name": "prompt_only"}, "moves blocks from boundary to boundary"),
        ({"ablate__reference": "9"}, "outside the backbone"),
        ({"ablate__match": "both"}, "config.ablate.match is 'both'"),
        ({"eval__tasks": "rule"}, "unknown task 'rule'"),
        ({"cal__num_heads": 3, "cal__num_kv_heads": 2}, "cal.num_heads: 3 query heads"),
    ],
)
def test_mistakes_are_told_before_anything_runs(place, changes, what):
    with pytest.raises(UserError, match=what):
        ablate.ablate(config_of(place, **changes), str(place / "never"))
    assert not list((place / "never").glob("*_s*"))


def test_states_made_from_a_lower_boundary_are_those_of_the_whole_prefix(place, tmp_path):
    stores, runs = {}, {}
    for boundary in (1, 2):
        config = config_of(place, adapter__placement=str(boundary), data__prefix_dir=str(tmp_path))
        run = runs[boundary] = build.open_run(config)
        examples = encode_corpus(run.tokenizer, sources.load_conversations(config.data.source), 256, run.policy)[0]
        store = stores[boundary] = train.open_prefix_store(run, tmp_path, examples)
        below = train.lower_prefixes(run, tmp_path, examples)
        assert (below is None) == (boundary == 1)
        sft.fill_prefix_store(run.model, build.load_weights(run), examples, store, lambda tokens: None, below)
    config = config_of(place, adapter__placement="2", data__prefix_dir=str(tmp_path / "alone"))
    alone = train.open_prefix_store(build.open_run(config), tmp_path, examples)
    sft.fill_prefix_store(runs[2].model, build.load_weights(runs[2]), examples, alone, lambda tokens: None)
    for index in range(len(examples)):
        np.testing.assert_array_equal(stores[2].read(index), alone.read(index))
