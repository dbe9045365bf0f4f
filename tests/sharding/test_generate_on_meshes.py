"""Generation and scores on a mesh of four devices are those of one, also with a quantised backbone."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests import tiny_runs

SCRIPT = """
import json, sys
from pathlib import Path
from calyrex_jax import infer
from tests import tiny_runs
place = Path(sys.argv[1])
for sizes, kind in json.loads(sys.argv[2]):
    mesh = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), sizes))
    config = tiny_runs.make_config(place / "model", backbone__quantize=kind, generate__batch_size=8, **mesh)
    for mode in ("score", "generate"):
        out = place / f"{mode}.jsonl"
        assert infer.run(config, str(place / "run"), mode, str(place / "chats.jsonl"), str(out)) == 0
        lines = [json.loads(line) for line in out.read_text().splitlines()]
        print("FOUND", json.dumps([line["logprobs"][1:] if mode == "score" else line["tokens"] for line in lines]))
"""


def found(place, devices, cases):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", SCRIPT, str(place), json.dumps(cases)]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=tiny_runs.ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("FOUND")) for line in done.stdout.splitlines() if line.startswith("FOUND")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["", "int8"])
def test_meshes_give_what_one_device_gives(kind, tmp_path):
    place = tiny_runs.furnish(tmp_path)
    scores, replies = found(place, 1, [((1, 1, 1), kind)])
    on_meshes = found(place, 4, [((1, 2, 2), kind), ((2, 2, 1), kind)])
    for other_scores, other_replies in zip(on_meshes[::2], on_meshes[1::2], strict=True):
        assert other_replies == replies
        for got, want in zip(other_scores, scores, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
