"""Every baseline as large as CAL, trained by the same loop, alone and together."""

import json

import jax
import numpy as np
import pytest

from calyrex_jax import build, makers, train
from calyrex_jax.backbones.named import named_spec
from calyrex_jax.config import default_config
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from tests import tiny_runs
from tests.tiny_runs import make_config

pytestmark = pytest.mark.usefixtures("own_signals")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    yield tiny_runs.furnish(tmp_path_factory.mktemp("baselines"))
    tiny_runs.forget_compilations()


@pytest.fixture(scope="module")
def config(place):
    def make(name, **changes):
        # nearly the whole corpus a step, so that losses compare
        plain = {"adapter__name": name, "train__steps": 5, "train__save_every": 2, "train__batch_size": 12}
        return make_config(place / "model", place / "chats.jsonl", **(plain | changes))

    return make


@pytest.fixture(scope="module")
def straight(config, place):
    """straight(name): the directory of five steps without interruption."""

    def run(name):
        if not (place / name).exists():
            assert train.train(config(name), str(place / name)) == 0
        return place / name

    return run


def saved(workdir, step=None):
    return {path: np.asarray(leaf) for path, leaf in trees.flatten(tiny_runs.all_adapters(workdir, step)).items()}


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen2.5-1.5B", "Llama-3.1-8B"])
@pytest.mark.parametrize("placement", ["late8th", "every", "last"])
@pytest.mark.parametrize("name", ["parallel_mlp", "lora", "late lora"])
def test_a_baseline_is_as_large_as_cal(model, placement, name):
    config, spec = default_config(), named_spec(model)
    config.adapter.placement, config.adapter.name = placement, name.split()[-1]
    config.lora.layers = "late8th" if name == "late lora" else "all"
    [adapter] = makers.adapters(config, spec)
    size = trees.count(jax.eval_shape(adapter.init, jax.random.key(0)))
    assert size == pytest.approx(makers.cal_budget(config, spec), rel=0.01)


def test_the_budget_follows_cals_own_fields():
    config, spec = default_config(), named_spec("SmolLM2-135M")
    config.adapter.name = "parallel_mlp"
    assert makers.cal_budget(config, spec) == 6_641_280
    config.cal.mlp_dim = 512
    assert makers.cal_budget(config, spec) == 6_641_280 + 5 * 3 * 576 * 256
    assert makers.adapters(config, spec)[0].config.mlp_dim == 1024
    config.cal.mlp_dim, config.adapter.name = 0, "lora"
    low_rank = makers.adapters(config, spec)[0].low_rank
    assert [rank for _, rank in low_rank.ranks] == [22] * 6 + [21] and low_rank.alpha == 42.0
    config.lora.rslora, config.lora.rank = True, 8
    low_rank = makers.adapters(config, spec)[0].low_rank
    assert {rank for _, rank in low_rank.ranks} == {8} and low_rank.scale("attn/w_q") == 16 / 8**0.5


@pytest.mark.parametrize("name", ["parallel_mlp", "lora", pytest.param("cal+parallel_mlp+lora", marks=pytest.mark.slow)])
def test_five_steps_train_every_leaf(straight, config, name):
    report = tiny_runs.report(straight(name))
    assert report["backbone_unchanged"] and report["steps"] == 5
    fresh = trees.flatten(build.fresh_adapters(build.open_run(config(name))))
    trained = saved(straight(name))
    assert fresh.keys() == trained.keys() and {path.split("/")[0] for path in fresh} == set(name.split("+"))
    for path, leaf in trained.items():
        assert (leaf != np.asarray(fresh[path])).any(), path
    losses = tiny_runs.losses(straight(name))
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_halted_run_goes_on_exactly(straight, config, tmp_path, monkeypatch):
    name = "cal+parallel_mlp+lora"
    with monkeypatch.context() as patch:
        tiny_runs.kill_at(patch, 3)
        assert train.train(config(name), str(tmp_path)) == 143
    assert train.train(config(name), str(tmp_path)) == 0
    for path, leaf in saved(straight(name)).items():
        np.testing.assert_array_equal(saved(tmp_path)[path], leaf, err_msg=path)


@pytest.mark.slow
def test_of_two_adapters_one_can_be_frozen(config, tmp_path):
    settings = config("cal+lora", train__freeze="cal", train__steps=2)
    assert train.train(settings, str(tmp_path)) == 0
    fresh = trees.flatten(build.fresh_adapters(build.open_run(settings)))
    for path, leaf in saved(tmp_path).items():
        assert (leaf == np.asarray(fresh[path])).all() == path.startswith("cal/"), path


def test_one_adapter_of_two_is_brought_by_init_from(straight, config):
    place = straight("parallel_mlp")
    run = build.open_run(config("cal+parallel_mlp", adapter__init_from=f"parallel_mlp={place}"))
    brought = build.brought_adapters(run)
    for path, leaf in saved(place).items():
        np.testing.assert_array_equal(trees.flatten(brought)[path], leaf)
    with pytest.raises(UserError, match=r"config\.parallel_mlp\.gate_by_span was False and is True"):
        build.trained_adapters(build.open_run(config("parallel_mlp", parallel_mlp__gate_by_span=True)), place)
    with pytest.raises(UserError, match=r"config\.adapter\.placement was '1,2' and is '2'"):
        build.trained_adapters(build.open_run(config("parallel_mlp", adapter__placement="2")), place)
    with pytest.raises(UserError, match=r"config\.adapter\.name was 'parallel_mlp' and is 'cal'"):
        build.trained_adapters(build.open_run(config("cal")), place)


def test_the_name_gives_the_order(config):
    for name in ("cal+parallel_mlp", "parallel_mlp+cal"):
        run = build.open_run(config(name))
        assert [adapter.name for adapter in run.model.adapters] == name.split("+")


def test_a_run_that_ends_within_its_warm_up_says_so(config, tmp_path, capsys):
    assert train.train(config("parallel_mlp", train__warmup_steps=20, train__steps=2), str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "config.train.warmup_steps=20 is above config.train.steps=2" in said and "ends at 0.1 of the peak" in said


@pytest.mark.slow
def test_lora_cannot_use_the_prefix_and_says_so(config, place, tmp_path, capsys):
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    tiny_runs.write_jsonl(tmp_path / "kept.jsonl", [row | {"distill": True} for row in rows])
    settings = config("lora", data__prefix_cache="float32", train__steps=2)
    settings.data.source = str(tmp_path / "kept.jsonl")
    assert train.train(settings, str(tmp_path / "run")) == 0
    said = capsys.readouterr().err
    assert "config.data.prefix_cache is not used" in said and not (tmp_path / "run" / "prefix").exists()
    assert "distilled conversations run the frozen layers from 0 on" in said
    assert abs(tiny_runs.losses(tmp_path / "run")[0]) < 1e-5  # the teacher is the model without LoRA
    settings = config("lora", lora__layers="1-1", data__prefix_cache="float32", train__steps=2)
    assert train.train(settings, str(tmp_path / "late")) == 0
    assert "prefix_cache is not used" not in capsys.readouterr().err and (tmp_path / "late" / "prefix").exists()


def test_a_lora_run_goes_to_peft_and_back(straight, config, tmp_path):
    settings = config("lora")
    run = build.open_run(settings)
    trained = build.trained_adapters(run, straight("lora"))["lora"]
    build.export_peft(run, trained, tmp_path / "peft")
    ranks = {rank for _, rank in run.model.lora.low_rank.ranks}
    assert ranks == {10}
    settings.adapter.init_from = f"lora={tmp_path / 'peft'}"
    brought = build.brought_adapters(build.open_run(settings))["lora"]
    for path, leaf in trees.flatten(trained).items():
        np.testing.assert_array_equal(trees.flatten(brought)[path], leaf)
    for field, value, said in (
        ("rank", 4, "set config.lora.rank=0"),
        ("alpha", 7.0, "set config.lora.alpha=20"),
        ("targets", "w_q", "set config.lora.targets=w_q,w_k,w_v,w_o,w_gate,w_up,w_down"),
        ("layers", "1", "set config.lora.layers=0-1"),
        ("rslora", True, "set config.lora.rslora=False"),
    ):
        other = settings.copy_and_resolve_references()
        other.lora[field] = value
        with pytest.raises(UserError, match=said) as caught:
            build.open_run(other)
        assert f"config.lora.{field} gives" in str(caught.value) and str(tmp_path / "peft") in str(caught.value)


def test_a_lora_of_other_fields_names_them(straight, config):
    for changes, said in (
        ({"lora__rank": 2}, r"config\.lora\.rank was 0 and is 2"),
        ({"lora__layers": "1"}, r"config\.lora\.layers was 'all' and is '1'"),
        ({"lora__alpha": 5.0}, r"config\.lora\.alpha was 0\.0 and is 5\.0"),
        ({"cal__mlp_dim": 64}, r"config\.cal\.mlp_dim was 16 and is 64"),  # its rank follows from CAL's size
    ):
        with pytest.raises(UserError, match=said):
            build.trained_adapters(build.open_run(config("lora", **changes)), straight("lora"))
