"""Topologies by name, and what is said of those that do not exist or cannot be compiled for."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.planning import machine
from calyrex_jax.planning.compiled import needed_bytes
from tests import tiny_runs

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")


def test_this_machine():
    here = machine.open_machine("")
    assert here.devices == tuple(jax.devices()) and here.platform == "cpu"
    assert here.limit == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(here.devices)
    assert machine.open_machine("cpu:1").figures == "CPU compiler"


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v5e:4", "v9:2x2", "v5e:0x4", "v5e:4x4x4x4", "tpu", "v5e:axb", "cpu:x"])
def test_a_topology_that_is_none(name):
    with pytest.raises(UserError, match=r"config\.plan\.topology='.*' is not a topology; write v5e:4x4"):
        machine.open_machine(name)


def test_more_cpu_devices_than_there_are():
    count = len(jax.devices("cpu"))  # from here on their number is fixed
    with pytest.raises(UserError, match=f"this process has {count} CPU devices"):
        machine.open_machine("cpu:64")


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(UserError, match=r"libtpu.* is not installed; pip install .*config\.plan\.topology=cpu:16"):
        machine.open_machine("v5e:4x4")


def test_needed_bytes():
    said = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 18.50G of 15.75G hbm. Exceeded by 2.75G."
    assert needed_bytes(said) == 18.5 * 2**30
    said = (
        "Ran out of memory on HBM, the total memory required for HLO temporaries (512.00M) exceeds available HBM (15.75G)."
    )
    assert needed_bytes(said) == 2**29
    with pytest.raises(ValueError, match="no figure"):
        needed_bytes("RESOURCE_EXHAUSTED: something else")


SCRIPT = """
import json
from calyrex_jax.core.errors import UserError
from calyrex_jax.planning import machine
found = {}
for name in ("v5e:4x4", "v5e:1x1", "v4:2x2x1", "v5p:2x2x1", "v6e:2x2"):
    made = machine.open_machine(name)
    found[name] = len(made.devices), made.limit / 2**30, made.platform
try:
    machine.open_machine("v5e:3x5")
except UserError as error:
    found["odd"] = str(error)
print("FOUND", json.dumps(found))
"""


@needs_libtpu
def test_topologies_and_their_memory():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tiny_runs.ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    if "held by another process" in done.stderr:
        pytest.skip("libtpu is held by another process")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.split("FOUND")[1])
    assert found["v5e:4x4"] == [16, 15.75, "tpu"] and found["v5e:1x1"] == [1, 15.75, "tpu"]
    assert found["v4:2x2x1"][:2] == [4, 30.75]  # a chip, not a core
    assert found["v6e:2x2"][:2] == [4, 31.25] and found["v5p:2x2x1"][0] == 4
    assert "v5e:3x5 is not a topology that libtpu knows" in found["odd"]
