"""How processes find one another, and which rows each brings, without starting any."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from calyrex_jax.core.errors import UserError
from calyrex_jax.sharding import processes

HERE = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.fixture
def joined(monkeypatch):
    """What jax.distributed.initialize was called with."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **more: calls.append((args, more)))
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    return calls


def test_named_processes_are_passed_to_jax_which_does_not_read_them_itself(joined):
    assert processes.join(HERE)
    [(args, more)] = joined
    assert args == ("10.0.0.1:1234", 4, 3)
    assert more["cluster_detection_method"] == "deactivate" and more["heartbeat_timeout_seconds"] == 100


def test_how_long_a_process_may_be_silent(joined):
    processes.join(HERE | {"CALYREX_HEARTBEAT_SECONDS": "20"})
    processes.join({"CALYREX_DISTRIBUTED": "1", "CALYREX_HEARTBEAT_SECONDS": "30"})
    assert [more["heartbeat_timeout_seconds"] for _, more in joined] == [20, 30]


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_COORDINATOR_ADDRESS": "node7:21234"},  # SLURM says the rest
        {"CALYREX_DISTRIBUTED": "1"},
        {"TPU_WORKER_HOSTNAMES": "a,b"},
    ],
)
def test_jax_finds_the_rest(joined, environment):
    assert processes.join(environment)
    assert joined == [((), {"heartbeat_timeout_seconds": 100})]


@pytest.mark.parametrize("environment", [{}, {"TPU_WORKER_HOSTNAMES": "localhost"}, {"CALYREX_DISTRIBUTED": "0"}])
def test_one_process_joins_nobody(joined, environment):
    assert not processes.join(environment)
    assert joined == []


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"JAX_PROCESS_ID": None}, "JAX_NUM_PROCESSES is set and JAX_PROCESS_ID is not"),
        ({"JAX_PROCESS_ID": "4"}, "JAX_PROCESS_ID=4; expected"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two"),
        ({"JAX_COORDINATOR_ADDRESS": None}, "expected HOST:PORT of process 0"),
        ({"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, "expected HOST:PORT of process 0"),
        ({"CALYREX_HEARTBEAT_SECONDS": "soon"}, "CALYREX_HEARTBEAT_SECONDS='soon'; expected a number of seconds"),
    ],
)
def test_variables_that_do_not_fit_together(joined, changes, said):
    environment = {name: value for name, value in (HERE | changes).items() if value is not None}
    with pytest.raises(UserError, match=said):
        processes.join(environment)
    assert joined == []


def test_a_coordinator_alone_says_what_is_missing(monkeypatch):
    def refuse(**_):
        raise ValueError("Number of processes must be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(UserError, match=r"cannot be found \(Number of processes must be defined"):
        processes.join({"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234"})


def mesh_of(hosts, data: int, tensor: int, monkeypatch, here: int) -> Mesh:
    """A stand-in for a mesh whose devices lie on these hosts, in the mesh's order."""
    devices = np.array([SimpleNamespace(process_index=host) for host in hosts], object).reshape(data, 1, tensor)
    monkeypatch.setattr(jax, "process_index", lambda: here)
    local = [device for device in devices.flat if device.process_index == here]
    return SimpleNamespace(devices=devices, shape={"data": data, "fsdp": 1, "tensor": tensor}, local_devices=local)


@pytest.mark.parametrize(
    "hosts, data, tensor, here, expected",
    [
        ([0, 0, 1, 1], 4, 1, 1, (1, 2)),  # two hosts of two rows each
        ([0, 0, 1, 1], 1, 4, 1, (0, 1)),  # the tensor axis spans both: both bring the same rows
        ([0, 0, 1, 1, 2, 2, 3, 3], 2, 4, 2, (1, 2)),
        ([0, 0, 1, 1, 0, 0, 1, 1], 2, 4, 1, (0, 1)),  # blocks of a TPU slice: every host holds shards of every row
        ([0, 1, 0, 1], 4, 1, 1, (1, 2)),  # rows need not lie together
    ],
)
def test_each_process_knows_its_part_of_the_rows(monkeypatch, hosts, data, tensor, here, expected):
    assert processes.row_group(mesh_of(hosts, data, tensor, monkeypatch, here)) == expected


def test_rows_cut_across_hosts_are_refused(monkeypatch):
    with pytest.raises(UserError, match=r"mesh.tensor=2: .* divides the 3 devices of a host"):
        processes.row_group(mesh_of([0, 0, 0, 1, 1, 1], 3, 2, monkeypatch, 0))
