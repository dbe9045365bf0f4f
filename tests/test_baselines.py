"""Every baseline as large as CAL, trained by the same loop, alone and together."""

import signal

import jax
import numpy as np
import pytest

from calyrex_jax import build, train
from calyrex_jax.backbones.named import named_spec
from calyrex_jax.config import default_config
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from tests import tiny_runs
from tests.tiny_runs import make_config


@pytest.fixture(autouse=True)
def own_signals():
    """A run takes SIGTERM and Ctrl-C over for its process; pytest gets them back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


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


def saved(workdir, step=None):
    return {path: np.asarray(leaf) for path, leaf in trees.flatten(tiny_runs.all_adapters(workdir, step)).items()}


@pytest.mark.parametrize("model", ["SmolLM2-135M", "Qwen2.5-1.5B", "Llama-3.1-8B"])
@pytest.mark.parametrize("placement", ["late8th", "every", "last"])
@pytest.mark.parametrize("name", ["parallel_mlp"])
def test_a_baseline_is_as_large_as_cal(model, placement, name):
    config, spec = default_config(), named_spec(model)
    config.adapter.placement, config.adapter.name = placement, name
    [adapter] = build.adapters(config, spec)
    size = trees.count(jax.eval_shape(adapter.init, jax.random.key(0)))
    assert size == pytest.approx(build.cal_budget(config, spec), rel=0.01)


def test_the_budget_follows_cals_own_fields():
    config, spec = default_config(), named_spec("SmolLM2-135M")
    config.adapter.name = "parallel_mlp"
    assert build.cal_budget(config, spec) == 6_641_280
    config.cal.mlp_dim = 512
    assert build.cal_budget(config, spec) == 6_641_280 + 5 * 3 * 576 * 256
    assert build.adapters(config, spec)[0].config.mlp_dim == 1024


@pytest.mark.parametrize("name", ["parallel_mlp", "cal+parallel_mlp"])
def test_five_steps_train_every_leaf_and_resume(config, name, tmp_path, monkeypatch):
    assert train.train(config(name), str(tmp_path / "straight")) == 0
    report = tiny_runs.report(tmp_path / "straight")
    assert report["backbone_unchanged"] and report["steps"] == 5
    fresh = trees.flatten(build.fresh_adapters(build.open_run(config(name))))
    trained = saved(tmp_path / "straight")
    assert fresh.keys() == trained.keys() and {path.split("/")[0] for path in fresh} == set(name.split("+"))
    for path, leaf in trained.items():
        assert (leaf != np.asarray(fresh[path])).any(), path
    losses = tiny_runs.losses(tmp_path / "straight")
    assert losses[-1] < losses[0]
    with monkeypatch.context() as patch:
        tiny_runs.kill_at(patch, 3)
        assert train.train(config(name), str(tmp_path / "halted")) == 143
    assert train.train(config(name), str(tmp_path / "halted")) == 0
    for path, leaf in saved(tmp_path / "halted").items():
        np.testing.assert_array_equal(leaf, trained[path], err_msg=path)


def test_of_two_adapters_one_can_be_frozen(config, tmp_path):
    settings = config("cal+parallel_mlp", train__freeze="cal")
    assert train.train(settings, str(tmp_path)) == 0
    fresh = trees.flatten(build.fresh_adapters(build.open_run(settings)))
    for path, leaf in saved(tmp_path).items():
        assert (leaf == np.asarray(fresh[path])).all() == path.startswith("cal/"), path


def test_one_adapter_of_two_is_brought_by_init_from(config, tmp_path):
    assert train.train(config("parallel_mlp"), str(tmp_path / "run")) == 0
    run = build.open_run(config("cal+parallel_mlp", adapter__init_from=f"parallel_mlp={tmp_path / 'run'}"))
    brought = build.brought_adapters(run)
    for path, leaf in saved(tmp_path / "run").items():
        np.testing.assert_array_equal(trees.flatten(brought)[path], leaf)
    with pytest.raises(UserError, match=r"config\.parallel_mlp\.gate_by_span was False and is True"):
        build.trained_adapters(build.open_run(config("parallel_mlp", parallel_mlp__gate_by_span=True)), tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.adapter\.placement was '1,2' and is '2'"):
        build.trained_adapters(build.open_run(config("parallel_mlp", adapter__placement="2")), tmp_path / "run")
    with pytest.raises(UserError, match=r"config\.adapter\.name was 'parallel_mlp' and is 'cal'"):
        build.trained_adapters(build.open_run(config("cal")), tmp_path / "run")


def test_the_name_gives_the_order(config):
    for name in ("cal+parallel_mlp", "parallel_mlp+cal"):
        run = build.open_run(config(name))
        assert [adapter.name for adapter in run.model.adapters] == name.split("+")


def test_a_run_that_ends_within_its_warm_up_says_so(config, tmp_path, capsys):
    assert train.train(config("parallel_mlp", train__warmup_steps=20, train__steps=2), str(tmp_path)) == 0
    said = capsys.readouterr().err
    assert "config.train.warmup_steps=20 is above config.train.steps=2" in said and "ends at 0.1 of the peak" in said
