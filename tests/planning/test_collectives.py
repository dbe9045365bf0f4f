"""Collectives read from programs' text: kinds, loops, fused steps that share a channel."""

import json
import os
import subprocess
import sys

import numpy as np

from calyrex_jax.planning import collectives
from calyrex_jax.planning.collectives import Collective
from tests import tiny_runs

TEXT = """
HloModule jit_f, num_partitions=4

%body.1 (param: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %all-gather.1 = f32[1,16,16]{2,1,0} all-gather(%slice), channel_id=1, dimensions={1}
  %all-gather.2 = f32[1,16,16]{2,1,0} all-gather(%slice), channel_id=1, dimensions={1}
  ROOT %tuple = (s32[], f32[2,16]) tuple(%add, %x)
}

%condition.1 (param.1: (s32[], f32[2,16])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  ROOT %lt = pred[] compare(%i, %bound), direction=LT
}

%unknown.2 (param.2: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %j), direction=LT
}

%inner.3 (param.3: s8[8]) -> s8[8] {
  ROOT %all-reduce.9 = s8[8]{0} all-reduce(%param.3), to_apply=%add
}

%outer.4 (param.4: (s32[])) -> (s32[]) {
  %fused = s8[8] fusion(%z), kind=kLoop, calls=%inner.3
  ROOT %w = (s32[]) while(%t), condition=%condition.1, body=%body.1
}

ENTRY %main (x: f32[2,16]) -> f32[2,16] {
  %while.8 = (s32[], f32[2,16]) while(%t), condition=%unknown.2, body=%outer.4, backend_config={"known_trip_count":{"n":"3"}}
  %moved = (bf16[4,2]{1,0}, bf16[4,2]{1,0}, u32[]) collective-permute-start(%y), channel_id=5
  ROOT %out = f32[2,16] get-tuple-element(%while.8), index=1
}
"""


def test_loops_multiply_and_channels_count_once():
    assert collectives.collectives(TEXT) == [
        Collective("all-gather", "f32", (1, 16, 16), 21),
        Collective("all-reduce", "s8", (8,), 3),
        Collective("collective-permute", "bf16", (4, 2), 1),
    ]


def test_summary_adds_up_by_kind():
    found = collectives.summary(collectives.collectives(TEXT))
    assert found["all-gather"] == {"count": 1, "runs": 21, "bytes": 21 * 1024}
    assert found["all-reduce"] == {"count": 1, "runs": 3, "bytes": 24}
    assert found["collective-permute"]["bytes"] == 16


def test_a_gathered_stack_is_named():
    one = Collective("all-gather", "f32", (4, 32, 48), 1)
    stacks = {"mlp/w_up": (4, 32, 48), "mlp/w_down": (4, 48, 32)}
    assert collectives.gathered_stacks([one], stacks) == ["mlp/w_up"]
    assert collectives.gathered_stacks([Collective("all-reduce", "f32", (4, 32, 48), 1)], stacks) == []


SCRIPT = """
import json, sys
import jax
from calyrex_jax import build, plan
from calyrex_jax.planning import machine
from calyrex_jax.planning.compiled import compile_program
from tests import tiny_runs

machine.open_machine("cpu:8")  # the first look says how many there are
for sizes, quantize in (((1, 4, 1), ""), ((2, 2, 2), ""), ((1, 4, 2), "int8")):
    config = tiny_runs.make_config(sys.argv[1], train__batch_size=8, data__max_length=64, plan__span=32)
    config.adapter.placement = "3"
    config.backbone.quantize = quantize
    config.mesh.data, config.mesh.fsdp, config.mesh.tensor = sizes
    where = machine.open_machine(f"cpu:{sizes[0] * sizes[1] * sizes[2]}")
    setting = plan.settle(config, where)
    program = plan.make_program(setting, "train")
    found = compile_program(program, where)
    entry = plan.as_json(setting, program, found)
    kinds = [(one.kind, one.dtype, one.shape, one.times) for one in found.found]
    print("FOUND", json.dumps({"stacks": entry["gathered_stacks"], "all": kinds, "bytes": entry["device_bytes"], "parts": program.parts}))
"""


def test_a_step_on_several_devices_gathers_layers_and_never_the_stack(tmp_path):
    tiny_runs.write_model(tmp_path / "model", num_hidden_layers=5)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "model")],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=tiny_runs.ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    plain, cut, int8 = (json.loads(x.removeprefix("FOUND")) for x in done.stdout.splitlines() if x.startswith("FOUND"))
    # layers of w_up [32, 48]; the three below the boundary run in one loop
    gathers = [tuple(shape) for kind, _, shape, times in plain["all"] if kind == "all-gather" and times == 3]
    assert any(shape in gathers for shape in ((1, 32, 48), (32, 48)))
    cut_gathers = [tuple(shape) for kind, _, shape, times in cut["all"] if kind == "all-gather" and times == 3]
    assert any(shape in cut_gathers for shape in ((1, 32, 24), (32, 24)))
    for found in (plain, cut, int8):
        assert found["stacks"] == []
        assert not [shape for kind, _, shape, _ in found["all"] if kind == "all-gather" and shape[0] == 5 and len(shape) > 2]
        # what it is handed is counted exactly, but for the scalars of the state; two masks of the batch lie on the device,
        # two rows of 64 booleans each, that the step does not read and the compiler therefore leaves out
        parts = sum(size for name, size in found["parts"].items() if name != "logits")
        assert 0 <= found["bytes"]["arguments"] - (parts - 2 * 2 * 64) < 64
    # int8 weights travel as int8; in float32 only their factors do, one an output channel
    moved = [(dtype, np.prod(shape)) for kind, dtype, shape, times in int8["all"] if kind == "all-gather" and times == 3]
    assert any(dtype == "s8" for dtype, _ in moved)
    assert all(size <= 32 for dtype, size in moved if dtype == "f32")
