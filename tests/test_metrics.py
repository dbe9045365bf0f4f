"""metrics.jsonl is valid and holds no step twice; progress is legible on a terminal and in a log."""

import io
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax import metrics
from calyrex_jax.core.errors import UserError
from calyrex_jax.metrics import Metrics, peak_memory


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(path) -> list[dict]:
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def quiet(directory) -> Metrics:
    return Metrics(directory, stream=io.StringIO(), tensorboard=False)


def test_one_object_a_line_flushed_at_once(tmp_path):
    show = quiet(tmp_path / "new")
    show.log(1, {"loss": jnp.float32(0.5), "tokens": np.int64(7), "name": "a"})
    assert lines(show.path) == [{"step": 1, "loss": 0.5, "tokens": 7, "name": "a"}]
    show.log(2, {"loss": 0.25})
    assert lines(show.path)[1] == {"step": 2, "loss": 0.25}
    show.close()


def test_what_is_not_finite_stays_valid_json(tmp_path):
    show = quiet(tmp_path)
    show.log(1, {"a": float("nan"), "b": np.float32("inf"), "c": -jnp.inf, "d": {"e": [1.0, float("nan")]}})
    assert lines(show.path) == [{"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": {"e": [1.0, "NaN"]}}]
    assert np.isnan(float(lines(show.path)[0]["a"]))


def test_resume_drops_later_steps_and_a_half_written_line(tmp_path):
    show = quiet(tmp_path)
    for step in (1, 2, 3, 4):
        show.log(step, {"loss": step})
    show.close()
    with open(show.path, "a") as file:
        file.write('{"step": 2, "lo')
    again = quiet(tmp_path)
    again.resume(2)
    again.log(3, {"loss": 30})
    assert [(x["step"], x["loss"]) for x in lines(again.path)] == [(1, 1), (2, 2), (3, 30)]
    fresh = quiet(tmp_path)
    fresh.resume(0)
    assert lines(fresh.path) == []


def test_nothing_is_created_before_the_first_log(tmp_path):
    show = quiet(tmp_path / "run")
    show.resume(0)
    with show.phase("scoring", 2, unit="chat") as bar:
        bar.update(2)
    show.close()
    assert not (tmp_path / "run").exists()


def test_only_process_zero_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    stream = io.StringIO()
    show = Metrics(tmp_path, stream=stream)
    show.log(1, {"loss": 1.0})
    show.say("hello")
    with show.phase("training", 1) as bar:
        bar.update(1)
    show.close()
    assert stream.getvalue() == "" and list(tmp_path.iterdir()) == []


def test_an_unwritable_directory_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(Not a directory\)"):
        quiet(tmp_path / "file" / "run").log(1, {"loss": 1.0})


def test_tensorboard_gets_the_numbers(tmp_path):
    show = Metrics(tmp_path, stream=io.StringIO())
    show.log(1, {"loss": 0.5, "note": "text"})
    show.close()
    (events,) = (tmp_path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"loss" in content and b"note" not in content


def test_a_log_gets_few_lines(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    show = Metrics(tmp_path, stream=stream)
    with show.phase("training", 100, unit="step", initial=20) as bar:
        for _ in range(80):
            now[0] += 0.5
            bar.update(1, loss=2.5, tokens_per_second=1234.0)
    out = stream.getvalue().splitlines()
    assert out[0] == "training  20% · 20/100 step"
    assert out[1] == "training  40% · 40/100 step · loss 2.5 · tok/s 1234 · 2 step/s · 0:30 left"
    assert out[-1] == "training 100% · 100/100 step · loss 2.5 · tok/s 1234 · 2 step/s · 0:40"
    assert len(out) == 1 + 4 + 1  # at the start, every ten seconds, at the end
    assert "\r" not in stream.getvalue()


def test_a_terminal_gets_one_bar_and_messages_above_it(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    stream = Terminal()
    show = Metrics(tmp_path, stream=stream)
    with show.phase("prefix cache", 4, unit="tok") as bar:
        now[0] += 1
        bar.update(2)
        show.say("note")
    text = stream.getvalue()
    assert text.endswith("\n") and text.count("\n") == 2
    assert "prefix cache [##########          ]  50%" in text
    assert "\r\x1b[Knote\n\r\x1b[Kprefix cache" in text


def test_a_failing_phase_ends_its_line(tmp_path):
    stream = Terminal()
    show = Metrics(tmp_path, stream=stream)
    with pytest.raises(KeyError), show.phase("training", 4):
        raise KeyError
    assert stream.getvalue().endswith("\n")


def test_peak_memory_counts_this_process():
    program = (
        "from calyrex_jax.metrics import peak_memory; a = peak_memory(); b = bytearray(b'x') * 200_000_000; del b; "
        "print(a, peak_memory())"
    )
    before, after = map(int, subprocess.check_output([sys.executable, "-c", program], text=True).split())
    assert 180e6 < after - before < 260e6
    assert peak_memory() > 10e6
