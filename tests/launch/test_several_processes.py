"""Two processes on this machine, by launch/local_processes.sh, against one: losses, SIGTERM to and death of one, restoring."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests import tiny_runs
from tests.launch.stubs import ROOT

pytestmark = pytest.mark.slow

# Python for the launcher: process 1 gets a signal after its third step, once $AWAITED is there; steps are slow from then on, as
# real ones are.
SIGNALLED = """#!/usr/bin/env bash
[ "$1" = -m ] || exec "$REAL" "$@"
shift 2
exec "$REAL" -c '
import os, signal, sys, time
from calyrex_jax import main, metrics
log = metrics.Metrics.log
def logged(self, at, values):
    log(self, at, values)
    if at == 3 and os.environ["JAX_PROCESS_ID"] == "1":
        while not os.path.exists(os.environ.get("AWAITED", "/")):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGNAL)
    if at >= 3:
        time.sleep(0.5)
metrics.Metrics.log = logged
sys.exit(main.main(sys.argv))' "$@"
"""


def python_with(signal: str, path) -> str:
    """A Python that sends process 1 that signal."""
    path.write_text(SIGNALLED.replace("signal.SIGNAL", f"signal.{signal}"))
    path.chmod(0o755)
    return str(path)


def processes(count: int, arguments, python: str, environment) -> subprocess.CompletedProcess:
    """The finished launcher."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    settings = plain | {"PYTHONPATH": str(ROOT), "PYTHON": python, "REAL": sys.executable} | environment
    command = ["bash", str(ROOT / "launch/local_processes.sh"), str(count), *arguments]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny_runs.furnish(tmp_path_factory.mktemp("several"))


@pytest.fixture(scope="module")
def compiled(place):
    return {"JAX_COMPILATION_CACHE_DIR": str(place / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture(scope="module")
def expected(place, compiled):
    """The losses of one process."""
    config = tiny_runs.make_config(place / "model", place / "chats.jsonl", train__steps=12, train__save_every=50)
    one = tiny_runs.command(*tiny_runs.arguments(config, place / "one"), **compiled)
    assert one.returncode == 0, one.stderr
    return tiny_runs.losses(place / "one")


def test_two_processes_equal_one_and_one_goes_on_where_a_signal_stopped_them(place, compiled, expected, tmp_path):
    config = tiny_runs.make_config(place / "model", place / "chats.jsonl", train__steps=12, train__save_every=50)
    python = python_with("SIGTERM", tmp_path / "python")
    stopped = processes(2, tiny_runs.arguments(config, tmp_path / "two"), python, compiled)
    assert stopped.returncode == 143, stopped.stderr
    assert "interrupted: everything finished so far is saved" in stopped.stderr
    found = tiny_runs.losses(tmp_path / "two")
    assert 3 <= len(found) < 12
    np.testing.assert_allclose(found, expected[: len(found)], atol=1e-5, rtol=0)

    resumed = tiny_runs.command(*tiny_runs.arguments(config, tmp_path / "two"), **compiled)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(rf"resumed from step {len(found)} of 12", resumed.stderr)
    np.testing.assert_allclose(tiny_runs.losses(tmp_path / "two"), expected, atol=1e-5, rtol=0)
    assert tiny_runs.report(tmp_path / "two")["backbone_unchanged"] is True


def test_a_process_that_dies_stops_the_other_and_four_go_on(place, compiled, expected, tmp_path):
    config = tiny_runs.make_config(place / "model", place / "chats.jsonl", train__steps=12, train__save_every=2)
    limits = {"CALYREX_HEARTBEAT_SECONDS": "10", "GRACE": "60", "TMPDIR": str(tmp_path)}
    python = python_with("SIGKILL", tmp_path / "python")
    saved = {"AWAITED": str(tmp_path / "run/checkpoints/2")}  # saving goes on beside the steps
    died = processes(2, tiny_runs.arguments(config, tmp_path / "run"), python, compiled | limits | saved)
    assert died.returncode == 128 + 9, died.stderr
    assert "process 1 ended with status 137" in died.stderr
    assert "error: another process of this run is gone" in died.stderr and "Traceback" not in died.stderr
    # process 0 ended by itself, before the launcher's limit
    assert "Killed" not in died.stderr.partition("process 1 ended")[2]

    four = processes(4, tiny_runs.arguments(config, tmp_path / "run"), sys.executable, compiled | limits)
    assert four.returncode == 0, four.stderr
    assert re.search(r"resumed from step [24] of 12", four.stderr)
    np.testing.assert_allclose(tiny_runs.losses(tmp_path / "run"), expected, atol=1e-5, rtol=0)


def test_what_serves_one_process_is_refused_on_two(place, tmp_path):
    config = tiny_runs.make_config(place / "model", place / "chats.jsonl")
    more = {"input": place / "chats.jsonl", "output": tmp_path / "out.jsonl"}
    done = processes(2, tiny_runs.arguments(config, tmp_path / "run", "score", **more), sys.executable, {})
    assert done.returncode == 2, done.stderr
    assert "error: --mode=score, as configured here, serves one process; run it on one host" in done.stderr
    assert not (tmp_path / "out.jsonl").exists()
