"""Whole runs on a tiny model: resuming, the prefix cache, reports, divergence, and whatever a user can get wrong."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import build, train
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.training import sft
from tests import tiny_runs
from tests.tiny_runs import make_config

pytestmark = pytest.mark.usefixtures("own_signals")

VARIANTS = {
    "plain": {},
    "packed": {"data__packing": True},
    "cached": {"data__prefix_cache": "float32"},
    "cached-packed": {"data__prefix_cache": "float32", "data__packing": True},
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    yield tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    tiny_runs.forget_compilations()


@pytest.fixture(scope="module")
def place(tmp_path_factory, environment):
    """A directory with model/ and chats.jsonl, where the module's runs go."""
    return tiny_runs.furnish(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def config(place):
    """config(train__steps=3, …) of a run on the module's model and conversations."""
    return lambda **changes: make_config(place / "model", changes.pop("data", place / "chats.jsonl"), **changes)


@pytest.fixture(scope="module")
def straight(place, config):
    """straight(variant): the directory of ten steps without interruption."""

    def run(name):
        if not (place / name).exists():
            assert train.train(config(**VARIANTS[name]), str(place / name)) == 0
        return place / name

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_five_steps_sigterm_and_five_more_equal_ten(straight, config, variant, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        tiny_runs.kill_at(patch, 5)
        assert train.train(config(**VARIANTS[variant]), str(tmp_path)) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "interrupted: everything finished so far is saved; the same command goes on from there"
    assert [line["step"] for line in tiny_runs.metrics(tmp_path)] == [1, 2, 3, 4, 5]
    assert not (tmp_path / "report.json").exists()
    assert train.train(config(**VARIANTS[variant]), str(tmp_path)) == 0
    assert "resumed from step 5 of 10" in capsys.readouterr().err
    assert_equal_runs(straight(variant), tmp_path)


def assert_equal_runs(first, second):
    tiny_runs.assert_same_adapters(first, second)
    assert [line["step"] for line in tiny_runs.metrics(second)] == list(range(1, 11))
    for a, b in zip(tiny_runs.metrics(first), tiny_runs.metrics(second), strict=True):
        assert [a[k] for k in ("loss", "grad_norm", "epoch")] == [b[k] for k in ("loss", "grad_norm", "epoch")]


KILLED = """
import os, signal, time
from pathlib import Path
from calyrex_jax.metrics import Metrics

log = Metrics.log
def logged(self, step, values):
    log(self, step, values)
    if step == 8:
        with open(self.path, "a") as file:
            file.write('{"step": 9, "lo')  # as a kill in the middle of a write would leave it
        while not (self.path.parent / "checkpoints" / "5").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
Metrics.log = logged
"""


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_last_checkpoint(straight, config, environment, tmp_path, capsys):
    settings = config(**VARIANTS["cached-packed"])
    done = tiny_runs.command(*tiny_runs.arguments(settings, tmp_path), first=KILLED, **environment)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert train.train(settings, str(tmp_path)) == 0
    assert "resumed from step 5 of 10" in capsys.readouterr().err
    assert_equal_runs(straight("cached-packed"), tmp_path)


def test_interrupted_while_the_prefix_cache_is_filled(straight, config, tmp_path, monkeypatch):
    write = train.PrefixStore.write

    def stopped(self, *arguments):
        write(self, *arguments)
        signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(train.PrefixStore, "write", stopped)
        assert train.train(config(**VARIANTS["cached-packed"]), str(tmp_path)) == 143
    assert not (tmp_path / "metrics.jsonl").exists()
    assert train.train(config(**VARIANTS["cached-packed"]), str(tmp_path)) == 0
    assert_equal_runs(straight("cached-packed"), tmp_path)


@pytest.mark.parametrize("packing", ["", "-packed"])
def test_the_prefix_cache_changes_no_loss(straight, packing):
    without = np.array(tiny_runs.losses(straight(packing.strip("-") or "plain")))
    cached = np.array(tiny_runs.losses(straight("cached" + packing)))
    np.testing.assert_allclose(cached[0], without[0], rtol=1e-5)
    np.testing.assert_allclose(cached, without, rtol=1e-4)


def test_the_prefix_cache_is_reused_by_another_run(straight, config, tmp_path, monkeypatch):
    def never(*_):
        raise AssertionError("computed again")

    monkeypatch.setattr(sft, "fill_prefix_store", never)
    shared = str(straight("cached") / "prefix")
    assert train.train(config(**VARIANTS["cached"], data__prefix_dir=shared), str(tmp_path)) == 0
    assert_equal_runs(straight("cached"), tmp_path)
    with pytest.raises(AssertionError, match="computed again"):  # another boundary has other states
        changed = config(**VARIANTS["cached"], data__prefix_dir=shared, adapter__placement="2")
        train.train(changed, str(tmp_path / "other"))


def test_one_compilation_a_length_bucket(config, tmp_path, caplog):
    data = tiny_runs.write_corpus(tmp_path / "two.jsonl", long=True)
    with jax.log_compiles(), caplog.at_level("WARNING", logger="jax"):
        assert train.train(config(data=data, train__batch_size=2, train__steps=20), str(tmp_path / "run")) == 0
    compiled = [record.getMessage() for record in caplog.records]
    steps = [line for line in compiled if line.startswith("Compiling jit(step)")]
    assert len(steps) == 2 == len(set(steps)), steps
    assert {line["epoch"] for line in tiny_runs.metrics(tmp_path / "run")} == {0, 1, 2}


def test_what_a_run_leaves(straight, config, place):
    run = straight("plain")
    assert {path.name for path in run.iterdir()} == {
        "checkpoints", "config.json", "metrics.jsonl", "report.json", "tensorboard", "tokens",
    }  # fmt: skip
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"5", "10"}
    saved = json.loads((run / "config.json").read_text())
    assert saved == build.as_dict(config())
    for line in tiny_runs.metrics(run):
        assert set(line) == {
            "step", "loss", "grad_norm", "skipped", "tokens_per_second", "targets_per_second", "learning_rate", "epoch",
        }  # fmt: skip
        assert line["skipped"] == 0 and line["tokens_per_second"] > line["targets_per_second"] > 0
        assert np.isfinite([line["loss"], line["grad_norm"]]).all()
    rates = [line["learning_rate"] for line in tiny_runs.metrics(run)]
    assert rates[0] == pytest.approx(0.01) and rates == sorted(rates, reverse=True)
    (events,) = (run / "tensorboard").iterdir()
    assert b"grad_norm" in events.read_bytes()

    report = tiny_runs.report(run)
    opened = build.open_run(config())
    assert report["steps"] == 10
    assert report["metrics"]["loss"] == tiny_runs.losses(run)[-1]
    assert report["backbone_unchanged"] is True
    assert report["backbone_sha256"] == trees.checksum(build.load_weights(opened))
    assert report["parameters"] == {
        "frozen": trees.count(build.load_weights(opened)),
        "trainable": trees.count(build.fresh_adapters(opened)),
    }
    assert report["conversations"] == {"read": 13, "kept": 13, "dropped": {}}
    assert report["wall_seconds"] > 0 and report["tokens_per_second"] > 0 and report["peak_memory_bytes"] > 1e7


def test_training_moves_every_leaf_of_the_adapter_and_lowers_the_loss(straight, config):
    fresh = trees.flatten(build.fresh_adapters(build.open_run(config())))
    moved = tiny_runs.adapters(straight("plain"))
    for path, leaf in moved.items():
        assert not np.array_equal(leaf, fresh[f"cal/{path}"]), path
    first, second = np.array_split(tiny_runs.losses(straight("plain")), 2)
    assert second.mean() < first.mean()


def test_the_same_command_after_the_end_changes_nothing(straight, config, place):
    run = straight("packed")
    before, lines = tiny_runs.adapters(run), tiny_runs.metrics(run)
    report = tiny_runs.report(run)
    assert train.train(config(**VARIANTS["packed"]), str(run)) == 0
    assert tiny_runs.metrics(run) == lines
    for path, leaf in tiny_runs.adapters(run).items():
        np.testing.assert_array_equal(leaf, before[path])
    assert tiny_runs.report(run)["metrics"] == report["metrics"]


def test_accumulated_microbatches_make_the_same_step(straight, config, tmp_path):
    assert train.train(config(train__accumulate=2), str(tmp_path)) == 0
    np.testing.assert_allclose(tiny_runs.losses(tmp_path), tiny_runs.losses(straight("plain")), rtol=1e-4)


def test_a_bfloat16_backbone_trains_and_stays(config, tmp_path):
    assert train.train(config(backbone__dtype="bfloat16", train__steps=2), str(tmp_path)) == 0
    assert tiny_runs.report(tmp_path)["backbone_unchanged"] is True
    assert all(leaf.dtype == np.float32 for leaf in tiny_runs.adapters(tmp_path).values())


def test_keep_limits_the_checkpoints(config, tmp_path):
    assert train.train(config(train__save_every=1, train__keep=2, train__steps=4), str(tmp_path)) == 0
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"3", "4"}


# Divergence


def test_broken_weights_stop_the_run_with_finite_parameters(place, tmp_path):
    def break_one(tree):
        tree["final_norm"]["scale"] = tree["final_norm"]["scale"].at[0].set(jnp.inf)
        return tree

    model = tiny_runs.write_model(tmp_path / "model", change=break_one)
    config = make_config(model, place / "chats.jsonl", train__max_skipped=3)
    with pytest.raises(UserError, match=r"3 steps in a row up to step 3 gave a loss or gradient that is not finite"):
        train.train(config, str(tmp_path / "run"))
    assert [line["skipped"] for line in tiny_runs.metrics(tmp_path / "run")] in ([1, 2], [1, 2, 3])
    assert tiny_runs.losses(tmp_path / "run")[0] == "NaN"
    fresh = trees.flatten(build.fresh_adapters(build.open_run(config)))
    for path, leaf in tiny_runs.adapters(tmp_path / "run", 3).items():
        np.testing.assert_array_equal(leaf, fresh[f"cal/{path}"], err_msg=path)


@pytest.mark.parametrize("rate", [1e30, 3e38])
def test_an_absurd_learning_rate_leaves_finite_parameters(config, rate, tmp_path):
    """Whether steps are skipped or the loss stays finite by luck of the norms, no parameter may become infinite."""
    try:
        train.train(config(train__learning_rate=rate, train__max_skipped=2, train__schedule="constant"), str(tmp_path))
    except UserError as error:
        assert "lower config.train.learning_rate" in str(error)
    for path, leaf in tiny_runs.adapters(tmp_path).items():
        assert np.isfinite(leaf).all(), path


# Resuming with another config


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train__learning_rate": 0.02}, "config.train.learning_rate was 0.01 and is 0.02"),
        ({"train__beta2": 0.95}, "config.train.beta2 was 0.999 and is 0.95"),
        ({"adapter__placement": "2"}, "config.adapter.placement was '1,2' and is '2'"),
        ({"cal__mlp_dim": 8}, "config.cal.mlp_dim was 16 and is 8"),
        ({"train__seed": 1}, "train.seed"),
        ({"train__batch_size": 2}, "train.batch_size"),
    ],
)
def test_a_changed_field_is_named_on_resume(straight, config, changes, said):
    before = tiny_runs.adapters(straight("plain"))
    with pytest.raises(UserError) as caught:
        train.train(config(train__steps=12, **changes), str(straight("plain")))
    assert said in str(caught.value)
    for path, leaf in tiny_runs.adapters(straight("plain")).items():
        np.testing.assert_array_equal(leaf, before[path])


def test_reset_optimizer_keeps_adapter_and_step(straight, config, tmp_path, capsys):
    import shutil

    shutil.copytree(straight("plain"), tmp_path / "run")
    changes = {"train__learning_rate": 1e-9, "train__steps": 12, "train__reset_optimizer": True}
    assert train.train(config(**changes), str(tmp_path / "run")) == 0
    assert "resumed from step 10 of 12" in capsys.readouterr().err
    assert [line["step"] for line in tiny_runs.metrics(tmp_path / "run")] == list(range(1, 13))
    before = tiny_runs.adapters(straight("plain"))
    for path, leaf in tiny_runs.adapters(tmp_path / "run", 12).items():
        np.testing.assert_allclose(leaf, before[path], atol=1e-7, err_msg=path)


def test_init_from_brings_another_runs_adapter(straight, config, tmp_path):
    brought = config(adapter__init_from=f"cal={straight('plain')}", train__learning_rate=1e-9, train__steps=1)
    assert train.train(brought, str(tmp_path)) == 0
    before = tiny_runs.adapters(straight("plain"))
    for path, leaf in tiny_runs.adapters(tmp_path).items():
        np.testing.assert_allclose(leaf, before[path], atol=1e-7, err_msg=path)


@pytest.mark.parametrize("value", ["cal", "lora=somewhere", "cal=nowhere"])
def test_init_from_that_brings_nothing(config, value, tmp_path):
    with pytest.raises(UserError) as caught:
        train.train(config(adapter__init_from=value), str(tmp_path))
    assert value.partition("=")[2] in str(caught.value) or "write NAME=DIR" in str(caught.value)


# What a user can get wrong


def lines_of(text):
    return lambda place: (place / "bad.jsonl").write_text(text) and {"data": place / "bad.jsonl"}


GOOD = json.dumps(tiny_runs.conversation("a", "b", "c")) + "\n"
BAD = {
    "no data": (lambda p: {"data": ""}, "config.data.source is empty"),
    "absent data": (lambda p: {"data": p / "absent.jsonl"}, "absent.jsonl: cannot be read"),
    "malformed line": (lines_of(GOOD + '{"messages": [\n'), "bad.jsonl:2: malformed JSON"),
    "null content": (lines_of(GOOD * 2 + '{"messages": [{"role": "user", "content": null}]}\n'), "bad.jsonl:3: messages[0]"),
    "no reply": (lines_of(json.dumps(tiny_runs.conversation("a")) + "\n"), "no conversation is left to train on"),
    "all too long": (lambda p: {"data__max_length": 20}, "no conversation is left to train on"),
    "no rules": (lambda p: {"data": "rules"}, "config.data.size is 0"),
    "prompt alone": (lambda p: {"adapter__name": "prompt_only"}, "nothing to train"),
    "adapter name": (lambda p: {"adapter__name": "lore"}, "config.adapter.name is 'lore'; known: cal, parallel_mlp"),
    "adapter twice": (lambda p: {"adapter__name": "cal+cal"}, "name each adapter once"),
    "placement": (lambda p: {"adapter__placement": "late9th"}, "adapter.placement: 'late9th'"),
    "boundary": (lambda p: {"adapter__placement": "1,3"}, "boundary 3 lies outside"),
    "schedule": (lambda p: {"train__schedule": "linear"}, "train.schedule: got 'linear'"),
    "rate": (lambda p: {"train__learning_rate": 0.0}, "train.learning_rate: got 0.0"),
    "warm-up": (lambda p: {"train__warmup_steps": -1}, "train.warmup_steps: got -1"),
    "freeze": (lambda p: {"train__freeze": "lora"}, "train.freeze: 'lora' is not an adapter"),
    "all frozen": (lambda p: {"train__freeze": "cal"}, "every adapter is frozen"),
    "keys": (lambda p: {"cal__keys_from": "none"}, "cal.keys_from: 'none' is not known"),
    "mesh": (lambda p: {"mesh__data": 3}, "makes 3 devices, but there are"),
    "steps": (lambda p: {"train__steps": 0}, "config.train.steps is 0"),
    "template": (lambda p: {"chat__template": "absent.jinja"}, "config.chat.template: absent.jinja cannot be read"),
    "prefix directory": (
        lambda p: {"data__prefix_cache": "float32", "data__prefix_dir": str(p / "chats.jsonl")},
        "prefix cache:",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_is_one_line_and_leaves_nothing(name, config, place, tmp_path):
    make, said = BAD[name]
    with pytest.raises(UserError) as caught:
        train.train(config(**make(place)), str(tmp_path / "run"))
    assert_nothing_is_left(caught.value, said, tmp_path / "run")


def assert_nothing_is_left(error, said, run):
    assert said in str(error)
    assert "\n" not in str(error)
    left = {path.relative_to(run).parts[0] for path in run.rglob("*") if path.is_file()} if run.exists() else set()
    assert left <= {"tokens"}  # what was encoded is right whatever else was wrong, and serves the next try


def cut(path):
    path.write_bytes(path.read_bytes()[:-1000])


def edit(**fields):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | fields))


BROKEN = {
    "no config": ("config.json", lambda path: path.unlink(), "config.json"),
    "config is no JSON": ("config.json", lambda path: path.write_text("{"), "config.json"),
    "foreign": ("config.json", edit(model_type="bert"), "llama"),
    "foreign scaling": ("config.json", edit(rope_scaling={"rope_type": "longrope"}), "longrope"),
    "other shape": ("config.json", edit(intermediate_size=64), "the weights do not fit the config"),
    "more layers": ("config.json", edit(num_hidden_layers=3), "the weights do not fit the config"),
    "fewer rows than ids": ("config.json", edit(vocab_size=100), ""),
    "no weights": ("model.safetensors", lambda path: path.unlink(), "safetensors"),
    "weights cut short": ("model.safetensors", cut, "model.safetensors"),
    "weights are no weights": ("model.safetensors", lambda path: path.write_text("hello"), "model.safetensors"),
    "no tokenizer": ("tokenizer.json", lambda path: path.unlink(), "no tokenizer.json"),
    "tokenizer is no JSON": ("tokenizer.json", lambda path: path.write_text("{"), "the tokenizer files cannot be read"),
    "no template": ("tokenizer_config.json", edit(chat_template=None), "without a chat template"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_one_line_and_leaves_nothing(name, place, tmp_path):
    file, damage, said = BROKEN[name]
    model = tiny_runs.write_model(tmp_path / "model")
    damage(model / file)
    with pytest.raises(UserError) as caught:
        train.train(make_config(model, place / "chats.jsonl"), str(tmp_path / "run"))
    assert_nothing_is_left(caught.value, said, tmp_path / "run")
    assert str(model) in str(caught.value)


@pytest.mark.parametrize("source", ["absent", "absent.gguf", "ftp:somewhere", "pypi:", "hf:"])
def test_a_model_that_is_nowhere(source, place, tmp_path):
    with pytest.raises(UserError) as caught:
        train.train(make_config(source, place / "chats.jsonl"), str(tmp_path / "run"))
    assert_nothing_is_left(caught.value, source.rstrip(":"), tmp_path / "run")


def test_overlong_conversations_are_dropped_and_counted(place, config, tmp_path, capsys):
    rows = [tiny_runs.conversation("a" * 10, "b", "c"), tiny_runs.conversation("a" * 300, "b", "c")]
    data = tiny_runs.write_jsonl(tmp_path / "two.jsonl", rows)
    assert train.train(config(data=data, train__steps=1), str(tmp_path / "run")) == 0
    found = tiny_runs.report(tmp_path / "run")["conversations"]
    assert (found["read"], found["kept"], sum(found["dropped"].values())) == (2, 1, 1)
    assert f"{data}:2" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_named(straight, config, tmp_path):
    import shutil

    shutil.copytree(straight("plain"), tmp_path / "run")
    for path in (tmp_path / "run/checkpoints/10/adapter_cal").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError, match=r"checkpoint of step 10 in .* cannot be read"):
        train.train(config(train__steps=12), str(tmp_path / "run"))


def test_several_processes_do_not_evaluate(config, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"config.eval.after_training=rules: .*run --mode=eval on one host"):
        train.train(config(eval__after_training="rules"), str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
