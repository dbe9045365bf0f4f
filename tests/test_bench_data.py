"""The benchmark of data, on a few conversations."""

import json

from calyrex_jax import bench_data
from tests import tiny_runs


def test_a_small_run(tmp_path, capsys):
    tiny_runs.write_model(tmp_path / "model")
    found = tmp_path / "data.json"
    options = ["--count=60", "--length=512", "--batch=2", "--seconds=2", "--workers=1"]
    assert bench_data.main([*options, f"--source={tmp_path / 'model'}", f"--json={found}"]) == 0
    lines = {line["what"]: line for line in json.loads(found.read_text())["lines"]}
    assert lines["resumed batches equal"]["value"] == 1
    assert lines["batches of 2 × 512, 1 workers"]["value"] > 1
    assert 50 < lines["packing: tokens over slots, whole epoch"]["value"] <= 100
    assert "prepared and encoded" in capsys.readouterr().out
    assert bench_data.main(["--count=0"]) == 2 and bench_data.main(["--no"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_generated_conversations_are_the_seeds():
    one, same, other = (list(bench_data.generate(3, seed)) for seed in (0, 0, 1))
    assert one == same != other
    assert [m["role"] for m in one[0]["messages"]][:3] == ["system", "user", "assistant"]
