"""The processes of one run: how they find one another, and which rows of a batch each of them brings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Mesh

from calyrex_jax.core.errors import UserError

COORDINATOR, COUNT, INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
DETECT, PATIENCE = "CALYREX_DISTRIBUTED", "CALYREX_HEARTBEAT_SECONDS"

# how collectives (gloo's, a network's) and the coordination service say that a peer does not answer any more
_GONE = re.compile(
    r"Gloo .*(Connection|Timed out|timeout)|[Hh]eartbeat|task .*(died|crashed|unhealthy)|NCCL .*(remote|peer|abort)"
)


def join(environment: Mapping[str, str] = os.environ) -> bool:
    """Joins the other processes that the environment tells of, before anything touches a device; whether there are any.

    JAX_COORDINATOR_ADDRESS  HOST:PORT of process 0. JAX_NUM_PROCESSES and JAX_PROCESS_ID say the rest, for jax reads
                             only the first by itself; without them SLURM or MPI must.
    TPU_WORKER_HOSTNAMES     more than one (as GKE sets it), or CALYREX_DISTRIBUTED=1 (a TPU pod, whose workers know one
                             another from the machine's metadata): jax finds everything by itself.

    CALYREX_HEARTBEAT_SECONDS  how long a process may be silent before the others stop (100).

    Raises UserError where these variables do not make sense together.
    """
    patience = environment.get(PATIENCE, "100")
    if not patience.isdecimal() or int(patience) < 1:
        raise UserError(f"environment: {PATIENCE}={patience!r}; expected a number of seconds of at least 1")
    numbers = {name: environment[name] for name in (COUNT, INDEX) if name in environment}
    if len(numbers) == 1:
        [name] = {COUNT, INDEX} - set(numbers)
        raise UserError(
            f"environment: {next(iter(numbers))} is set and {name} is not; set both, or neither under SLURM or MPI"
        )
    if numbers:
        _join_named(environment, numbers, int(patience))
    elif COORDINATOR in environment or environment.get(DETECT) == "1" or _several(environment):
        try:
            jax.distributed.initialize(heartbeat_timeout_seconds=int(patience))
        except ValueError as error:  # nothing was detected that says how many there are
            raise UserError(
                f"environment: the processes of this run cannot be found ({error}); set {COORDINATOR}, {COUNT} and {INDEX}, "
                "or start it by a script of launch/"
            ) from None
    else:
        return False
    return jax.process_count() > 1


@contextmanager
def watched() -> Iterator[None]:
    """Around a run: where another process of it is gone, says so in one line and ends this one with status 1, at once.

    An orderly end would wait for the process that is gone.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1 or not _GONE.search(str(error)):
            raise
        reason = " ".join(str(error).split())[:200]
        print(
            f"error: another process of this run is gone ({reason}); start the same command again on all hosts: it goes on from "
            "the last saved step",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _several(environment: Mapping[str, str]) -> bool:
    return len(environment.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1


def _join_named(environment: Mapping[str, str], numbers: Mapping[str, str], patience: int) -> None:
    shown = ", ".join(f"{name}={value}" for name, value in numbers.items())
    if not all(value.isdecimal() for value in numbers.values()) or not int(numbers[INDEX]) < int(numbers[COUNT]):
        raise UserError(f"environment: {shown}; expected a count of at least 1 and an id from 0 to one below it")
    address = environment.get(COORDINATOR, "")
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdecimal():
        raise UserError(f"environment: {COORDINATOR}={address!r} with {shown}; expected HOST:PORT of process 0")
    # all is said: what else the machine might tell (an enclosing SLURM job) is not asked
    jax.distributed.initialize(
        address,
        int(numbers[COUNT]),
        int(numbers[INDEX]),
        cluster_detection_method="deactivate",
        initialization_timeout=120,
        heartbeat_timeout_seconds=patience,
    )


def row_group(mesh: Mesh) -> tuple[int, int]:
    """(index, count): this process brings the index-th of `count` equal parts of a batch's rows.

    Processes that hold shards of the same rows, as where the tensor axis spans hosts, are one group and bring the same.
    Raises UserError where the mesh cuts rows across hosts so that no equal parts exist.
    """
    rows = mesh.devices.reshape(mesh.shape["data"] * mesh.shape["fsdp"], -1)
    held: dict[int, set[int]] = {}
    for number, devices in enumerate(rows):
        for device in devices:
            held.setdefault(device.process_index, set()).add(number)
    groups = sorted({tuple(sorted(numbers)) for numbers in held.values()})
    if sum(len(group) for group in groups) != len(rows) or len({len(group) for group in groups}) != 1:
        raise UserError(
            f"mesh.tensor={mesh.shape['tensor']}: hosts would share some of their rows and not others; choose a mesh.tensor "
            f"that divides the {len(mesh.local_devices)} devices of a host, or a multiple of them"
        )
    return groups.index(tuple(sorted(held[jax.process_index()]))), len(groups)
