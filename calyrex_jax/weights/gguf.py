"""The GGUF format of llama.cpp: typed fields, then tensors in any of its quantised types.

The header is parsed here, in a tenth of the time that the `gguf` package takes for a real vocabulary; the arithmetic of
the quantised types is that package's, applied to a few rows at a time.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights.reader import TensorInfo, read_bytes

_MAGIC = b"GGUF"
_FIRST_READ = 16 << 20
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PLAIN = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}


class Entry(NamedTuple):
    """A tensor in the file: absolute offset, shape (outermost axis first), type name, and the bytes of one row."""

    offset: int
    shape: tuple[int, ...]
    type: str
    row_bytes: int


@dataclass(frozen=True)
class Header:
    """`fields` are the file's key/value pairs as Python values (arrays as lists, or numpy arrays of numbers)."""

    fields: dict[str, Any]
    tensors: dict[str, Entry]


class GGUFReader:
    """The tensors of one GGUF file, dequantised.

        reader = GGUFReader(Path("model.gguf"))
        reader.rows("token_embd.weight", 0, 16)   # [16, D] float32

    Raises UserError where the file is cut, is no GGUF file or has a tensor that the gguf package cannot dequantise.
    """

    def __init__(self, path: Path, header: Header | None = None):
        self._path = path
        self._tensors = (header or read_header(path)).tensors
        self._kernels = {kind: _kernel(kind, path) for kind in sorted({entry.type for entry in self._tensors.values()})}
        stored = {kind: np.dtype(_PLAIN[kind]).name if kind in _PLAIN else kind for kind in self._kernels}
        self._names = {name: TensorInfo(entry.shape, stored[entry.type]) for name, entry in self._tensors.items()}

    def names(self) -> dict[str, TensorInfo]:
        """Every tensor of the file."""
        return self._names

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of the outermost axis: float32, or the stored type where that is a plain float."""
        entry = self._tensors[name]
        row_bytes = entry.row_bytes if len(entry.shape) > 1 else entry.row_bytes // entry.shape[0]
        data = read_bytes(self._path, entry.offset + start * row_bytes, (stop - start) * row_bytes)
        shape = (stop - start, *entry.shape[1:])
        if entry.type in _PLAIN:
            return data.view(_PLAIN[entry.type]).reshape(shape)
        return self._kernels[entry.type](data.reshape(-1, row_bytes)).reshape(shape)


def _kernel(type_name: str, path: Path) -> Any:
    """The gguf package's function from whole rows of bytes to float32, or None for plain types.

    Its `dequantize` does the same in groups of 16 rows and then joins a second whole copy; a few hundred rows at a
    time are twice as fast.
    """
    if type_name in _PLAIN:
        return None
    import gguf.quants  # only quantised files need the package

    quantised = getattr(gguf.quants, type_name, None)
    if quantised is None or not hasattr(quantised, "dequantize_rows"):
        raise UserError(f"{path}: tensors of type {type_name} cannot be dequantised; take a file in another quantisation")
    quantised.init_grid()
    return quantised.dequantize_rows


def read_header(path: Path) -> Header:
    """Fields and tensor table of a file, checked against its size."""
    try:
        with open(path, "rb") as file:
            if file.read(4) != _MAGIC:
                raise UserError(f"{path}: not a GGUF file (it does not begin with 'GGUF'); give a .gguf file")
            size = file.seek(0, 2)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check the path") from None
    # the header's length is written nowhere: a vocabulary takes a few MB, so read on only where that is not enough
    length = min(size, _FIRST_READ)
    while True:
        try:
            return _parse(memoryview(read_bytes(path, 0, length)), path, size)
        except (struct.error, IndexError):
            if length == size:
                raise UserError(f"{path}: ends within its header; the file was cut; fetch it again") from None
            length = min(size, 4 * length)


def _parse(data: memoryview, path: Path, size: int) -> Header:
    cursor = _Cursor(data, 4)
    version = cursor.scalar("<I")
    if version not in (2, 3):
        raise UserError(f"{path}: GGUF version {version} (or big-endian); versions 2 and 3, little-endian, are known")
    tensor_count, field_count = cursor.scalar("<Q"), cursor.scalar("<Q")
    fields: dict[str, Any] = {}
    try:
        for _ in range(field_count):
            name = cursor.string()
            fields[name] = cursor.value(cursor.scalar("<I"))
        infos = [_tensor_info(cursor) for _ in range(tensor_count)]
    except (ValueError, KeyError):
        raise UserError(f"{path}: the header is damaged near byte {cursor.position}; fetch the file again") from None
    alignment = fields.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise UserError(f"{path}: general.alignment is {alignment!r}; expected a positive number; fetch the file again")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, Entry] = {}
    for name, shape, type_id, offset in infos:
        if name in tensors:
            raise UserError(f"{path}: {name} appears twice; fetch the file again")
        tensors[name] = _entry(name, shape, type_id, start + offset, path)
        end = start + offset + tensors[name].row_bytes * int(np.prod(shape[:-1], dtype=np.int64))
        if end > size:
            raise UserError(f"{path}: ends at byte {size} but {name} reaches byte {end}; the file was cut; fetch it again")
    return Header(fields, tensors)


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
    return name, dims[::-1], cursor.scalar("<I"), cursor.scalar("<Q")


def _entry(name: str, shape: tuple[int, ...], type_id: int, offset: int, path: Path) -> Entry:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(type_id)
    except ValueError:
        raise UserError(f"{path}: {name} has the unknown type number {type_id}; update the gguf package") from None
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if not shape or 0 in shape or shape[-1] % block:
        raise UserError(
            f"{path}: {name} has shape {shape}, which {kind.name} (blocks of {block}) cannot hold; fetch it again"
        )
    return Entry(offset, shape, kind.name, shape[-1] // block * block_bytes)


class _Cursor:
    """A position in the header; running off its end raises struct.error or IndexError."""

    def __init__(self, data: memoryview, position: int):
        self.data, self.position = data, position

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self.data, self.position)
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        begin = self.position + 8
        self.position = begin + self.scalar("<Q")
        if self.position > len(self.data):
            raise IndexError(self.position)
        return str(self.data[begin : self.position], "utf-8")

    def strings(self, count: int) -> list[str]:
        """As `string`, for the hundred thousands of a vocabulary: no call per entry."""
        data, position, unpack = self.data, self.position, struct.Struct("<Q").unpack_from
        out = []
        for _ in range(count):
            begin = position + 8
            position = begin + unpack(data, position)[0]
            out.append(str(data[begin:position], "utf-8"))
        self.position = position
        if position > len(data):
            raise IndexError(position)
        return out

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("<I"), self.scalar("<Q")
        if kind == _STRING:
            return self.strings(count)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(count)]
        dtype = np.dtype(_SCALARS[kind])
        begin, self.position = self.position, self.position + count * dtype.itemsize
        if self.position > len(self.data):
            raise IndexError(self.position)
        return np.frombuffer(self.data, dtype, count, begin).copy()
