"""A mesh of data, fsdp and tensor axes over all devices."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from calyrex_jax.core.errors import UserError

AXES = ("data", "fsdp", "tensor")


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None) -> Mesh:
    """The mesh; one size may be -1, "the rest".

        >>> make_mesh().shape                                   # on one device
        OrderedDict({'data': 1, 'fsdp': 1, 'tensor': 1})

    Raises UserError where the sizes do not multiply to the number of devices.
    """
    devices = np.asarray(jax.devices() if devices is None else devices)
    sizes = {"data": data, "fsdp": fsdp, "tensor": tensor}
    shown = ", ".join(f"mesh.{axis}={size}" for axis, size in sizes.items())
    bad = [axis for axis, size in sizes.items() if size == 0 or size < -1]
    if bad:
        raise UserError(f"{shown}: mesh.{bad[0]} must be at least 1, or -1 for the rest")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise UserError(f"{shown}: only one axis can be -1 (the rest); give the other a size")
    fixed = int(np.prod([size for size in sizes.values() if size != -1]))
    if open_axes:
        if devices.size % fixed:
            raise UserError(f"{shown}: {fixed} does not divide {devices.size} devices; change mesh.* so that it does")
        sizes[open_axes[0]] = devices.size // fixed
    elif fixed != devices.size:
        raise UserError(f"{shown}: makes {fixed} devices, but there are {devices.size}; set one axis to -1")
    # Auto axis types (Mesh's default): jax.make_mesh's Explicit ones break jit(optimizer.init)
    return Mesh(devices.reshape(tuple(sizes.values())), AXES)
