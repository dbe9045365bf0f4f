"""The devices that a plan compiles for: this machine's, virtual CPU devices, or a TPU topology that is not here."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from calyrex_jax.core.errors import UserError

# dense bfloat16 operations a second and device, from Google Cloud's system pages of the TPU versions
PEAK_FLOPS = {"v4": 275e12, "v5e": 197e12, "v5p": 459e12, "v6e": 918e12}
_FORM = "v5e:4x4, v6e:2x2, v4:2x2x2, v5p:2x2x1 (a slice's shape as Google Cloud writes it), or cpu:8"
_HOST = 8  # chips at most that one machine of a small slice has


@dataclass(frozen=True)
class Machine:
    """Devices to compile for.

    figures  whose they are: "TPU compiler" or, where the program would run elsewhere in the end, "CPU compiler"
    limit    bytes of memory a device; None where unknown
    flops    bfloat16 operations a second and device; None where unknown
    """

    name: str
    platform: str
    devices: tuple[Any, ...]
    figures: str
    limit: int | None
    flops: float | None


def open_machine(topology: str) -> Machine:
    """The machine that config.plan.topology names; "" is this one.

    For a TPU topology no TPU is touched: libtpu compiles, and this process stays on the CPU. Raises UserError where the
    topology does not exist, or libtpu is absent or held by another process.
    """
    if not topology:
        return _here()
    if (virtual := re.fullmatch(r"cpu:(\d+)", topology)) is not None:
        return _virtual(topology, int(virtual[1]))
    version, _, shape = topology.partition(":")
    if version not in PEAK_FLOPS or not re.fullmatch(r"\d+(x\d+){1,2}", shape) or 0 in map(int, shape.split("x")):
        raise UserError(
            f"config.plan.topology={topology!r} is not a topology; write {_FORM}; or leave it empty for this machine"
        )
    return _tpu(topology, version, tuple(map(int, shape.split("x"))))


def _here() -> Machine:
    devices = jax.devices()
    platform = devices[0].platform
    stats = (devices[0].memory_stats() or {}) if platform != "cpu" else {}
    limit = stats.get("bytes_limit") or _host_memory() // len(devices)
    return Machine(
        f"this machine ({devices[0].device_kind})", platform, tuple(devices), f"{platform.upper()} compiler", limit, None
    )


def _virtual(topology: str, count: int) -> Machine:
    with contextlib.suppress(RuntimeError):  # the backend is up already: as many as it has
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(count, 1))
    devices = jax.devices("cpu")
    if not 0 < count <= len(devices):
        raise UserError(
            f"config.plan.topology={topology}: this process has {len(devices)} CPU devices; ask for as many, or fewer"
        )
    return Machine(topology, "cpu", tuple(devices[:count]), "CPU compiler", _host_memory() // count, None)


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _tpu(topology: str, version: str, shape: tuple[int, ...]) -> Machine:
    if importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise UserError(
            f"config.plan.topology={topology}: libtpu, the TPU compiler, is not installed; pip install 'calyrex_jax[tpu]' (no TPU "
            f"is needed), or set config.plan.topology=cpu:{prod(shape)} for the CPU compiler's figures"
        )
    # the compiler alone: no questions to a TPU's metadata server, no TPU taken from a job that runs here
    quiet = {"TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_WORKER_HOSTNAMES": "localhost"}
    for name, value in (quiet | {"TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}).items():
        os.environ.setdefault(name, value)
    jax.config.update("jax_platforms", "cpu")
    devices = _topology_devices(topology, version, shape)
    return Machine(topology, "tpu", devices, "TPU compiler", _memory_limit(devices[0]), PEAK_FLOPS[version])


def _topology_devices(topology: str, version: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    from jax.experimental import topologies  # loads libtpu

    # a v4 chip's two cores work as one device
    options: dict[str, Any] = {"chip_config_name": "megacore"} if version == "v4" else {}
    single = {"chips_per_host_bounds": (*shape, 1, 1)[:3]}
    for extra in ({}, single) if prod(shape) <= _HOST else ({},):
        try:
            return tuple(topologies.get_topology_desc(topology, "tpu", **options, **extra).devices)
        except jax.errors.JaxRuntimeError as error:
            said = " ".join(str(error).split())
        if "chips_per_host_bounds" not in said:
            break
    if "lockfile" in said:
        raise UserError(
            f"config.plan.topology={topology}: libtpu is held by another process of this machine (one at a time can use it); wait "
            "until that one has ended, and try again"
        )
    raise UserError(f"config.plan.topology={topology} is not a topology that libtpu knows ({said[:160]}); write {_FORM}")


def _memory_limit(device: Any) -> int:
    """Bytes that the compiler lets a program have on a chip: it says so of a program that would need a terabyte."""
    vast = jax.ShapeDtypeStruct((1 << 38,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x + 1).lower(vast).compile()
    except jax.errors.JaxRuntimeError as error:
        if (found := re.search(r"available HBM \(([\d.]+)([GM])\)", str(error))) is not None:
            return int(float(found[1]) * (1 << (30 if found[2] == "G" else 20)))
        raise
    raise RuntimeError("the compiler accepted a program of a terabyte: this version of libtpu says no limit")
