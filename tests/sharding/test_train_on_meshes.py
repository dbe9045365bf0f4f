"""The same run on one device and on meshes of four: every loss is the same, distilled targets and the copying path included."""

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
from calyrex_jax import train
from tests import tiny_runs
place = Path(sys.argv[1])
for sizes, name in json.loads(sys.argv[2]):
    mesh = dict(zip(("mesh__data", "mesh__fsdp", "mesh__tensor"), sizes))
    config = tiny_runs.make_config(
        place / "model", place / "mixed.jsonl", adapter__name=name, cal__copying=True, train__steps=5, train__batch_size=4, **mesh
    )
    directory = place / "-".join(map(str, [name, *sizes]))
    assert train.train(config, str(directory)) == 0
    print("LOSSES", json.dumps(tiny_runs.losses(directory)))
"""


def losses(place, devices, meshes):
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    command = [sys.executable, "-c", SCRIPT, str(place), json.dumps(meshes)]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=tiny_runs.ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line.removeprefix("LOSSES")) for line in done.stdout.splitlines() if line.startswith("LOSSES")]


@pytest.mark.slow
def test_meshes_give_the_losses_of_one_device(tmp_path):
    place = tiny_runs.furnish(tmp_path)
    rows = [json.loads(line) for line in (place / "chats.jsonl").read_text().splitlines()]
    mixed = [row | {"distill": number % 2 == 0} for number, row in enumerate(rows)]
    tiny_runs.write_jsonl(place / "mixed.jsonl", mixed)
    names = ("cal", "lora")
    alone = dict(zip(names, losses(place, 1, [((1, 1, 1), name) for name in names]), strict=True))
    assert all(len(found) == len(set(found)) == 5 for found in alone.values())
    meshes = [(sizes, "cal") for sizes in ((4, 1, 1), (2, 2, 1), (1, 2, 2))] + [((1, 2, 2), "lora")]
    for (_, name), found in zip(meshes, losses(place, 4, meshes), strict=True):
        # LoRA's first gradients are small, and Adam makes full steps of their rounding
        np.testing.assert_allclose(found, alone[name], rtol=1e-4 if name == "lora" else 1e-5)
