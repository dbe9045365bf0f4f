"""The command as a user runs it, in its own process: exit statuses, and one line for every mistake."""

import json
import os
import signal
import time

import pytest

from tests import tiny_runs
from tests.tiny_runs import arguments, assert_one_error, command, make_config

CONFIG = f"--config={tiny_runs.ROOT / 'tests/plain_config.py'}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    yield tiny_runs.keep_compilations(tmp_path_factory.mktemp("compiled"))
    tiny_runs.forget_compilations()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny_runs.furnish(tmp_path_factory.mktemp("main"))


@pytest.mark.slow
def test_train_then_score_then_generate(place, environment, tmp_path):
    config = make_config(place / "model", place / "chats.jsonl", train__steps=2)
    done = command(*arguments(config, tmp_path / "run"), **environment)
    assert done.returncode == 0, done.stderr
    assert "done: 2 steps" in done.stderr and "2/2 step" in done.stderr
    assert json.loads((tmp_path / "run/report.json").read_text())["steps"] == 2

    flags = {"input": place / "chats.jsonl", "output": tmp_path / "scores.jsonl"}
    done = command(*arguments(config, tmp_path / "run", "score", **flags), **environment)
    assert done.returncode == 0, done.stderr
    assert "checkpoint of step 2" in done.stderr
    scored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [len(line["tokens"]) == len(line["logprobs"]) for line in scored] == [True] * 13

    prompts = tiny_runs.write_jsonl(tmp_path / "prompts.jsonl", [tiny_runs.conversation("Who?", None, "Be brief", id=1)])
    flags = {"input": prompts, "output": tmp_path / "replies.jsonl"}
    done = command(*arguments(config, tmp_path / "run", "generate", **flags), **environment)
    assert done.returncode == 0, done.stderr
    (line,) = [json.loads(line) for line in (tmp_path / "replies.jsonl").read_text().splitlines()]
    assert line["id"] == 1 and line["finish_reason"] in ("stop", "length")


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_143(place, environment, tmp_path):
    config = make_config(place / "model", place / "chats.jsonl", train__steps=100_000, train__save_every=100_000)
    running = command(*arguments(config, tmp_path / "run"), wait=False, **environment)
    deadline = time.monotonic() + 300
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 2):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    _, said = running.communicate(timeout=120)
    assert running.returncode == 143, said
    assert said.splitlines()[-1].startswith("interrupted: everything finished so far is saved")
    assert "Traceback" not in said
    (step,) = [int(path.name) for path in (tmp_path / "run/checkpoints").iterdir()]
    assert step == json.loads(log.read_text().splitlines()[-1])["step"] >= 2


BAD_COMMANDS = {
    "nothing": ([], "--config is missing"),
    "no such config": (["--config=absent.py"], "--config=absent.py: No such file or directory; name a file"),
    "config without get_config": ([f"--config={tiny_runs.ROOT / 'setup.py'}"], "command line:"),
    "unknown field": (
        [CONFIG, "--config.train.no_such=1"],
        "the config has no field 'no_such'; calyrex_jax/config.py lists all.",
    ),
    "misspelt field": ([CONFIG, "--config.train.stepz=1"], 'lists all. Did you mean "steps" instead of "stepz"?'),
    "wrong type": ([CONFIG, "--config.train.steps=many"], "config.train.steps"),
    "wrong switch": ([CONFIG, "--config.data.packing=perhaps"], "config.data.packing"),
    "unknown flag": ([CONFIG, "--nonsense=1"], "nonsense"),
    "unknown mode": ([CONFIG, "--mode=dance"], "mode"),
    "a word": ([CONFIG, "train"], "'train' is not understood"),
}


@pytest.mark.parametrize("name", BAD_COMMANDS)
def test_a_command_line_that_makes_no_sense(name):
    flags, said = BAD_COMMANDS[name]
    assert_one_error(command(*flags), said)


def test_help_is_quick_and_no_mistake():
    done = command("--help", first="import sys; sys.modules['jax'] = None")
    assert "--workdir" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


BAD_RUNS = {
    "no workdir": ({}, {"workdir": ""}, "--workdir is missing"),
    "bad value": ({"train__steps": 0}, {}, "config.train.steps is 0"),
    "bad checkpoint": ({"backbone__source": "absent"}, {}, "absent"),
    "bad data": ({"data__source": "absent.jsonl"}, {}, "absent.jsonl: cannot be read"),
    "bad corpus": ({"data__max_length": 2}, {}, "no conversation"),
    "no input": ({}, {"mode": "score"}, "--input is missing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_run_that_cannot_work(name, place, tmp_path):
    changes, flags, said = BAD_RUNS[name]
    config = make_config(place / "model", place / "chats.jsonl", **changes)
    done = command(*arguments(config, **({"workdir": tmp_path / "run"} | flags)))
    assert_one_error(done, said)
    # a corpus that was encoded is kept: another max_length reads it again
    left = {path.name for path in (tmp_path / "run").iterdir()} if (tmp_path / "run").exists() else set()
    assert left == ({"tokens"} if name == "bad corpus" else set())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_workdir(place, tmp_path):
    tmp_path.chmod(0o500)
    done = command(*arguments(make_config(place / "model", place / "chats.jsonl"), tmp_path / "run"))
    assert_one_error(done, "--workdir", "Permission denied")
