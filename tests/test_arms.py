"""Arms of an ablation: what they change and what they refuse, learning curves of one run, and the sweep of rates."""

import json

import pytest

from calyrex_jax import ablate, arms, build, evaluate, makers, train
from calyrex_jax.backbones import named
from calyrex_jax.config import as_dict, default_config
from calyrex_jax.core.errors import UserError
from tests import tiny_runs

ARMS = "cal: ; all: cal.keys_from=all, train.steps=2, ablate.rates="


def spec_of(name="SmolLM2-135M"):
    return named.named_spec(next(known for known in named.NAMED if name.lower() in known.lower()))


def config_of(text, **changes):
    config = default_config()
    config.backbone.source, config.ablate.reference, config.ablate.arms = "x", "cal", text
    for field, value in changes.items():
        group, name = field.split("__")
        config[group][name] = value
    return config


def test_arms_change_what_they_name_and_nothing_else(tmp_path):
    text = (
        "cal: ; far: adapter.placement=26,30, cal.rope=true; mlp: adapter.name=parallel_mlp, parallel_mlp.gate_by_span=True"
    )
    config = config_of(text + ";lora: adapter.name=lora, lora.layers=late8th, ablate.seeds=1", ablate__seeds=2)
    plain = as_dict(config)
    found = arms.plan(config, spec_of(), tmp_path)
    assert [arm.name for arm in found] == ["cal_s0", "far_s0", "mlp_s0", "lora_s0", "cal_s1", "far_s1", "mlp_s1"]
    by_name = {arm.name: arm for arm in found}
    assert by_name["far_s0"].boundaries == (26, 30) and by_name["far_s1"].config.cal.rope is True
    assert by_name["mlp_s0"].config.parallel_mlp.gate_by_span is True and by_name["mlp_s1"].config.train.seed == 1
    assert as_dict(config) == plain, "the config itself stays"
    alike = by_name["cal_s0"].config
    assert alike.cal == config.cal and alike.adapter == config.adapter
    budget = makers.cal_budget(config, spec_of())
    for name in ("cal_s0", "mlp_s0", "lora_s0"):
        assert abs(by_name[name].parameters / budget - 1) < 0.01, name


def test_arms_match_the_reference_where_sizes_differ(tmp_path):
    text = "cal: cal.mlp_dim=384; two: adapter.placement=29,30; copying: cal.copying=true; mlp: adapter.name=parallel_mlp"
    found = arms.plan(config_of(text, ablate__match="parameters"), spec_of(), tmp_path)
    sizes = {arm.method: arm.parameters for arm in found}
    assert sizes["cal"] > 7e6
    for name, size in sizes.items():
        assert abs(size / sizes["cal"] - 1) < 0.01, (name, sizes)


def test_only_what_has_a_frozen_prefix_keeps_it(tmp_path):
    text = "cal: ; lora: adapter.name=lora; late: adapter.name=lora, lora.layers=late8th; low: adapter.placement=2,30"
    found = arms.plan(config_of(text, data__prefix_cache="bfloat16"), spec_of(), tmp_path)
    assert {arm.method: arm.config.data.prefix_cache for arm in found} == {
        "cal": "bfloat16", "lora": "off", "late": "bfloat16", "low": "off",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("cal: cal.keys=all", r"config\.ablate\.arms: cal: 'cal\.keys=all' is not understood; write FIELD=VALUE"),
        ("cal: train.steps", r"cal: 'train\.steps' is not understood"),
        ("cal: keys_from=all", r"cal: 'keys_from=all' is not understood"),
        ("cal: train=3", r"cal: 'train=3' is not understood"),
        ("cal: cal.keys_from=al", r"cal: cal\.keys_from: 'al' is not known"),
        ("cal: train.steps=many", r"cal: train\.steps='many', expected int"),
        ("cal: cal.rope=2", r"cal: cal\.rope='2', expected bool"),
        ("cal: cal.init=zero", r"cal: config\.cal\.init is 'zero'"),
        ("cal: backbone.dtype=bfloat16", r"cal: backbone\.dtype is the same for all arms; set --config\.backbone\.dtype"),
        ("cal: attention=xla", r"cal: attention is the same for all arms"),
        ("cal: train.seed=4", r"train\.seed is the same for all arms"),
        ("cal: ablate.match=width", r"ablate\.match is the same for all arms"),
        ("cal: ablate.rates=0", r"config\.ablate\.rates is '0', expected learning rates"),
        ("cal: adapter.name=cals", r"cal: config\.adapter\.name is 'cals'"),
        ("cal: adapter.name=iti", r"adapter\.name=iti is not trained"),
        ("cal: adapter.name=prompt_only", r"the frozen model is always compared"),
        ("cal: adapter.placement=31", r"cal: adapter\.placement: boundary 31 lies outside"),
        ("cal: ; cal:", r"'cal:' is not understood; write NAME: FIELD=VALUE"),
        ("a b: ", r"'a b:' is not understood"),
        ("frozen: ", r"none of them frozen"),
        ("other: ", r"config\.ablate\.reference='cal' is none of config\.ablate\.arms: other"),
    ],
)
def test_mistakes_in_arms_are_told_in_one_line(text, what, tmp_path):
    with pytest.raises(UserError, match=what) as told:
        arms.plan(config_of(text), spec_of(), tmp_path)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"ablate__placements": "last"}, "arms and placements exclude each other"),
        ({"ablate__curve": "1,x"}, r"config\.ablate\.curve is '1,x'"),
        ({"ablate__curve": "1"}, r"config\.train\.schedule=cosine the rate falls"),
    ],
)
def test_other_mistakes(changes, what, tmp_path):
    with pytest.raises(UserError, match=what):
        arms.plan(config_of("cal:", **changes), spec_of(), tmp_path)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    root = tmp_path_factory.mktemp("arms")
    tiny_runs.write_model(root / "model", max_position_embeddings=4096)
    tiny_runs.write_corpus(root / "chats.jsonl")
    yield root
    tiny_runs.forget_compilations()


def run_config(place, **changes):
    plain = {
        "train__schedule": "constant",
        "train__steps": 3,
        "train__keep": 1,
        "ablate__arms": ARMS,
        "ablate__reference": "cal",
        "ablate__curve": "1,2",
        "ablate__curve_tasks": "perplexity",
        "ablate__primary": "perplexity: perplexity; preference: 0 tokens/begin",
        "eval__tasks": "preference,perplexity",
        "eval__context_lengths": "0",
        "eval__shots": "0",
        "eval__limit": 4,
        "eval__batch_size": 8,
        "data__prefix_cache": "float32",
    }
    return tiny_runs.make_config(place / "model", place / "chats.jsonl", **(plain | changes))


@pytest.mark.slow
def test_a_curve_comes_from_one_run_and_the_sweep_from_its_beginning(place, capsys):
    work = place / "work"
    config = run_config(place, ablate__rates="1e-3,1e-2", ablate__rate_steps=2)
    assert ablate.ablate(config, str(work)) == 0
    report = json.loads((work / "report.json").read_text())
    rows = {row["name"]: row for row in report["ablation"]}
    assert {name: row["steps"] for name, row in rows.items()} == {"cal": 3, "all": 2}
    assert list(report["models"]) == ["cal", "all", "frozen", "cal@1", "cal@2", "all@1"]
    assert list(report["compare"])[:1] == ["all - cal"] and "all - cal@2" in report["compare"], (
        "at equal steps where it can be"
    )
    assert set(report["models"]["cal@1"]) == {"perplexity"}, "the curve's tasks alone"
    assert set(report["models"]["cal"]) == {"preference", "perplexity"}
    tried = report["rates"]["cal"]
    best = min(tried["perplexity"], key=lambda rate: tried["perplexity"][rate]["value"])
    assert set(report["rates"]) == {"cal"} and tried["edge"] is True
    assert tried["chosen"] == float(best) == rows["cal"]["learning_rate"]
    # the run goes on from its trial, with one checkpoint a mark
    assert sorted(path.name for path in (work / "cal_s0" / "checkpoints").iterdir()) == ["1", "2", "3"]
    assert tiny_runs.losses(work / "cal_s0")[:2] == tiny_runs.losses(work / "sweep" / f"cal_lr{tried['chosen']:g}")
    assert rows["cal"]["loss"] == tiny_runs.losses(work / "cal_s0")[2]
    html = (work / "report.html").read_text()
    assert "perplexity: perplexity, by step" in html and "Primary cells" in html and "Learning rate of cal" in html

    before = {path: path.stat().st_mtime_ns for path in work.glob("**/checkpoints/*")}
    capsys.readouterr()
    assert ablate.ablate(config, str(work)) == 0
    said = capsys.readouterr().err
    assert said.count("finished earlier") == 4 and "verdicts kept" in said
    assert before == {path: path.stat().st_mtime_ns for path in work.glob("**/checkpoints/*")}
    assert json.loads((work / "report.json").read_text())["ablation"] == report["ablation"]

    # a longer run goes on from there, what was measured on the way stays, and so does the shorter run
    longer = run_config(
        place, train__steps=4, ablate__arms="cal:", ablate__curve="1,2,3", train__learning_rate=tried["chosen"]
    )
    assert ablate.ablate(longer, str(work)) == 0
    again = json.loads((work / "report.json").read_text())
    assert [row["steps"] for row in again["ablation"]] == [4]
    assert again["models"]["cal@3"]["perplexity"]["value"] == report["models"]["cal"]["perplexity"]["value"]
    assert len(tiny_runs.losses(work / "cal_s0")) == 4
    capsys.readouterr()
    assert ablate.ablate(config, str(work)) == 0
    assert capsys.readouterr().err.count("finished earlier") == 4
    again = json.loads((work / "report.json").read_text())["ablation"]
    assert [row | {"wall_seconds": 0} for row in again] == [row | {"wall_seconds": 0} for row in report["ablation"]]


def test_a_checkpoint_that_is_gone_is_named(place, tmp_path):
    config = run_config(place, train__steps=1, ablate__arms="")
    assert train.train(config, str(tmp_path)) == 0
    with pytest.raises(UserError, match=r"its checkpoint of step 3 is gone \(it has 1\); delete .* to train it again"):
        evaluate.compared_runs(build.open_run(config), {"a": evaluate.Place(tmp_path, 3)})
