"""Compiling a program and what the compiler says of it: bytes a device, or by how much it does not fit."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import jax

from calyrex_jax.planning.collectives import Collective, collectives
from calyrex_jax.planning.machine import Machine
from calyrex_jax.planning.programs import Program

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Figures:
    """Bytes on one device.

    arguments, temporaries, peak  peak is the TPU compiler's own; elsewhere arguments, results and temporaries together
    limit    of memory; None where unknown
    fits     whether the compiler took it, and peak is within limit
    reason   what the compiler said where it refused
    seconds  of compilation
    found    the collectives, largest first
    """

    arguments: int
    temporaries: int
    peak: int
    limit: int | None
    fits: bool
    reason: str
    seconds: float
    found: tuple[Collective, ...]


def compile_program(program: Program, machine: Machine) -> Figures:
    """Traces and compiles; a program that is too large comes back with `fits` false instead of an error."""
    arguments = sum(size for name, size in program.parts.items() if name not in ("cache", "logits"))
    lowered = program.lower()
    started = time.monotonic()
    try:
        made = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        said = " ".join(str(error).split())
        if "RESOURCE_EXHAUSTED" not in said:
            raise
        used = needed_bytes(said)
        seconds = time.monotonic() - started
        return Figures(arguments, max(used - arguments, 0), used, machine.limit, False, said[:300], seconds, ())
    seconds = time.monotonic() - started
    stats = made.memory_analysis()
    arguments, temporaries = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    whole = arguments + stats.output_size_in_bytes - stats.alias_size_in_bytes + temporaries
    # the TPU compiler's own peak; the CPU's leaves out what is not handed in or out
    peak = stats.peak_memory_in_bytes if machine.platform == "tpu" else whole
    fits = machine.limit is None or peak <= machine.limit
    return Figures(arguments, temporaries, peak, machine.limit, fits, "", seconds, tuple(collectives(made.as_text())))


def needed_bytes(said: str) -> int:
    """How much a refused program needs, from the TPU compiler's message.

    >>> needed_bytes("Used 18.50G of 15.75G hbm. Exceeded hbm capacity by 2.75G.") / 2**30
    18.5
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of", said) or re.search(r"\(([\d.]+)([KMGT]?)B?\) exceeds available", said)
    if found is None:
        raise ValueError(f"the compiler's message gives no figure: {said[:200]}")
    return int(float(found[1]) * _UNITS[found[2]])
