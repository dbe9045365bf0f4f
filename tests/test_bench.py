"""The benchmark on a tiny model: that it runs, tells its aims apart, and works without torch."""

import html
import json
import re

import pytest

from calyrex_jax import bench
from tests import tiny_runs


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_runs.write_model(tmp_path_factory.mktemp("bench"))


def test_every_part_gives_its_figures(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: name == "jax" or None)
    monkeypatch.setattr(bench, "NEW", 4)
    target = tmp_path / "bench.json"
    flags = ["--only=flops,train,decode,load", "--steps=2", f"--source={model}", f"--json={target}"]
    assert bench.main([*flags, f"--html={tmp_path / 'bench.html'}"]) == 0
    page = (tmp_path / "bench.html").read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert "torch and peft are not installed" in said
    lines = {line["name"]: line for line in json.loads(target.read_text())["lines"]}
    assert len(lines) == 3 + 3 + 6 + 1
    for name, line in lines.items():
        assert f"| {name} " in said and html.escape(name) in page
        assert len(line["ours"]) == (1 if name.startswith("GFLOP") else 2) and min(line["ours"]) > 0
        assert (line["theirs"] is None) == (line["ratio"] is None)
    cost = lines["decoding seconds, CAL late8th, batch 8"]
    assert cost["ratio"] == [a / b for a, b in zip(cost["ours"], cost["theirs"])]
    rows = [line for line in said.splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1 and len(rows) == 2 + len(lines)


@pytest.mark.slow
def test_the_baseline_runs_beside(model, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="the baseline is torch's")
    pytest.importorskip("peft", reason="the baseline is peft's LoRA")
    monkeypatch.setattr(bench, "NEW", 4)
    target = tmp_path / "bench.json"
    assert bench.main(["--only=train,decode,load,memory", "--steps=1", f"--source={model}", f"--json={target}"]) == 0
    lines = json.loads(target.read_text())["lines"]
    assert len(lines) == 3 + 6 + 1 + 2
    for line in lines:
        assert len(line["ratio"]) == 1 and line["ratio"][0] == pytest.approx(line["ours"][0] / line["theirs"][0])
        assert (line["met"] is None) == (line["aim"] == "")
    memory = [line for line in lines if line["name"].startswith("peak MB")]
    assert all(50 < value < 20_000 for line in memory for value in line["ours"] + line["theirs"])


@pytest.mark.parametrize(("aim", "ratio", "met"), [("≥ 1.7", 1.7, True), ("≥ 1.7", 1.6, False), ("≤ 0.55", 0.5, True)])
def test_an_aim_is_met_by_the_median(aim, ratio, met):
    assert bench.compare("x", [ratio, 100 * ratio, ratio], [1.0, 1.0, 1.0], aim).met is met
    assert bench.compare("x", [ratio], None, aim).met is None
    assert bench.compare("x", [ratio], [1.0]).met is None


def test_the_table_shows_median_and_range():
    text = bench.table([bench.compare("speed", [300.0, 100.0, 200.0], [100.0, 100.0, 100.0], "≥ 1.5", "note")])
    assert re.sub(" +", " ", text.splitlines()[2]) == (
        "| speed | 200 (100–300) | 100 (100–100) | 2.00 (1.00–3.00) | ≥ 1.5 | yes | note |"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only=speed"], "--only: 'speed' is not a part; known: flops, train"),
        (["--steps=0"], "--steps is 0"),
        (["--steps=many"], "command line: argument --steps"),
        (["--nonsense"], "command line: unrecognized arguments: --nonsense"),
        (["--json=absent/x.json"], "its directory does not exist"),
        (["--html=absent/x.html"], "--html=absent/x.html: its directory does not exist"),
        (["--source=absent"], "absent"),
    ],
)
def test_a_mistake_is_one_line(flags, said, capsys):
    assert bench.main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and said in error
