"""The safetensors format: a JSON header of names, types, shapes and offsets, then the raw tensors.

Read and written here by plain file operations, so that a tensor costs memory only while it is being copied.
Source: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights.reader import TensorInfo, read_bytes

INDEX = "model.safetensors.index.json"

_TYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_MAX_HEADER = 100 << 20  # the format's own limit


class SafetensorsReader:
    """The tensors of one or several safetensors files.

        reader = SafetensorsReader([Path("model.safetensors")])
        reader.rows("lm_head.weight", 0, 16)    # [16, D]

    weight_map, from the index of a sharded checkpoint, says in which file each tensor is expected.
    Raises UserError where a file is cut, is no safetensors file, repeats a tensor or disagrees with the index.
    """

    def __init__(self, files: Sequence[Path], weight_map: Mapping[str, str] | None = None):
        self._entries: dict[str, tuple[Path, int, TensorInfo]] = {}
        for path in files:
            for name, (offset, info) in read_header(path).items():
                if name in self._entries:
                    raise UserError(f"{path}: {name} is in {self._entries[name][0].name} too; remove the stray file")
                self._entries[name] = (path, offset, info)
        if weight_map is not None:
            self._check_index(weight_map, files[0].parent / INDEX)
        self._names = {name: info for name, (_, _, info) in self._entries.items()}

    def _check_index(self, weight_map: Mapping[str, str], where: Path) -> None:
        found = {name: path.name for name, (path, _, _) in self._entries.items()}
        absent = [f"{name} not in {file}" for name, file in weight_map.items() if found.get(name) != file]
        extra = [f"{name} in {file}" for name, file in found.items() if name not in weight_map]
        if absent or extra:
            lines = absent + [f"{line} but not in the index" for line in extra]
            more = f" and {len(lines) - 5} more" if len(lines) > 5 else ""
            raise UserError(
                f"{where}: the index disagrees with its files: {'; '.join(lines[:5])}{more}; "
                "one of them is stale: fetch the checkpoint again"
            )

    def names(self) -> dict[str, TensorInfo]:
        """Every tensor that the files hold."""
        return self._names

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the outermost axis, in the stored type."""
        path, offset, info = self._entries[name]
        dtype = np.dtype(info.dtype)
        stride = int(np.prod(info.shape[1:], dtype=np.int64)) * dtype.itemsize
        data = read_bytes(path, offset + start * stride, (stop - start) * stride)
        return data.view(dtype).reshape((stop - start, *info.shape[1:]))


def read_header(path: Path) -> dict[str, tuple[int, TensorInfo]]:
    """{name: (absolute offset, info)} of one file, with its size checked against the tensors it announces."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
    length = int.from_bytes(read_bytes(path, 0, 8).tobytes(), "little") if size >= 8 else 0
    if not 2 <= length <= min(size - 8, _MAX_HEADER):
        raise UserError(f"{path}: not a safetensors file, or cut ({size} bytes); fetch it again")
    try:
        header = json.loads(read_bytes(path, 8, length).tobytes())
        header.pop("__metadata__", None)
        entries = {name: _entry(name, entry, 8 + length, path) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: the header is not that of a safetensors file; fetch it again") from None
    end = max((offset + _num_bytes(info) for offset, info in entries.values()), default=8 + length)
    if end != size:
        raise UserError(f"{path}: holds {size} bytes but its header announces {end}; it was cut or altered; fetch it again")
    return entries


def _entry(name: str, entry: dict, start: int, path: Path) -> tuple[int, TensorInfo]:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _TYPES:
        raise UserError(f"{path}: {name} has type {entry['dtype']}; known types: {', '.join(_TYPES)}")
    info = TensorInfo(tuple(int(n) for n in entry["shape"]), _TYPES[entry["dtype"]].name)
    if begin < 0 or end - begin != _num_bytes(info):
        raise UserError(f"{path}: {name} takes {end - begin} bytes but its shape {info.shape} needs {_num_bytes(info)}")
    return start + begin, info


def _num_bytes(info: TensorInfo) -> int:
    return int(np.prod(info.shape, dtype=np.int64)) * np.dtype(info.dtype).itemsize


def write(path: Path, tensors: Mapping[str, TensorInfo], value: Callable[[str], np.ndarray]) -> None:
    """Writes one file, asking for one tensor at a time: `value(name)` must have the announced shape and type.

    The file appears under its name only once complete. Raises UserError where the disk refuses it.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    position = 0
    for name, info in tensors.items():
        header[name] = {
            "dtype": _NAMES[np.dtype(info.dtype)],
            "shape": list(info.shape),
            "data_offsets": [position, position + _num_bytes(info)],
        }
        position += _num_bytes(info)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at multiples of 8
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name in tensors:
                file.write(np.ascontiguousarray(value(name)).reshape(-1).view(np.uint8).data)
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error}); check space and permissions") from None
    finally:
        partial.unlink(missing_ok=True)
