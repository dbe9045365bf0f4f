"""Checkpoint to parameter tree, leaf by leaf and a few rows at a time, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core import quantized
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.trees import flatten, unflatten
from calyrex_jax.core.types import Tree
from calyrex_jax.weights import mapping, safetensors
from calyrex_jax.weights.config import config_from_spec
from calyrex_jax.weights.gguf import GGUFReader
from calyrex_jax.weights.reader import Reader, TensorInfo
from calyrex_jax.weights.sources import ModelSource

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_CHUNK = 1 << 18  # elements read and converted at a time: 1 MB of float32 stays in the processor's cache
_THREADS = min(4, os.cpu_count() or 1)


def load_backbone(
    source: ModelSource,
    spec: DecoderSpec,
    dtype: jax.typing.DTypeLike,
    shardings: Tree | None = None,
    progress: Callable[[int, int], object] | None = None,
    kind: str = "",
) -> Tree:
    """The backbone's parameter tree, every leaf in `dtype`, or as core/quantized.py's `kind` has it.

        source = resolve("hf:Qwen/Qwen2.5-1.5B-Instruct")
        spec = DecoderSpec.from_config(source.config)
        backbone = load_backbone(source, spec, "bfloat16")

    Leaves are built one after the other from a few rows at a time; with `shardings` (a tree like the backbone's) this
    process reads only what its devices hold. The host keeps the finished leaves, on CPU, and the one being built.
    What is quantised is so layer by layer, from one layer in float32; each process reads all of it, since a channel's
    factor depends on all of its inputs.
    progress(done, total) is told the bytes of `dtype` after every leaf.
    Raises UserError where any tensor is missing, left over, misshapen or of a type that is no floating point number,
    all of them in one message, and where a tied model's checkpoint holds a different output head.
    """
    reader = open_reader(source)
    dtype = jax.numpy.dtype(dtype)
    abstract = flatten(abstract_params(spec, dtype))
    rows = mapping.rows_for(source.kind, spec, abstract)
    stored = _check(source, spec, reader, abstract, rows)
    made = flatten(quantized.abstract(unflatten(abstract), kind))
    placements = dict.fromkeys(made) if shardings is None else flatten(shardings)
    if placements.keys() != made.keys():
        raise ValueError(f"shardings do not match the backbone: {sorted(placements.keys() ^ made.keys())}")
    total = sum(leaf.size * dtype.itemsize for leaf in abstract.values())
    done, leaves = 0, {}
    with ThreadPoolExecutor(_THREADS) as pool:
        # largest first: at the largest leaf, where a second copy of it may exist, little else is held
        for path in sorted(abstract, key=lambda path: -abstract[path].size):
            leaf = abstract[path]
            if own := quantized.kind_of(path, kind):
                wide = jax.ShapeDtypeStruct(leaf.shape, np.float32)
                fill = _Filler(reader, rows[path], stored, wide, pool)
                for name, host in _encoded(fill, path, own).items():
                    part = f"{path}/{name}"
                    leaves[part] = _place(lambda index, host=host: host[index], made[part], placements[part])
            else:
                fill = _Filler(reader, rows[path], stored, leaf, pool)
                leaves[path] = _place(fill, leaf, placements[path])
            done += leaf.size * dtype.itemsize
            if progress is not None:
                progress(done, total)
    return unflatten(leaves)


def open_reader(source: ModelSource) -> Reader:
    """The tensors of a source. Raises UserError where its files are cut or disagree with each other."""
    if source.kind == "gguf":
        return GGUFReader(source.weight_files[0])
    return safetensors.SafetensorsReader(source.weight_files, source.weight_map)


def _check(
    source: ModelSource, spec: DecoderSpec, reader: Reader, abstract: dict[str, Any], rows: dict[str, mapping.Row]
) -> dict[str, str]:
    """{expected tensor name: stored name}, or UserError with everything that does not fit."""
    infos = reader.names()
    expected: dict[str, tuple[int, ...]] = {}
    for path, row in rows.items():
        layered = path.startswith("layers/")
        shape = mapping.stored_shape(row, abstract[path].shape[layered:])
        for name in _layer_names(row, spec.num_layers):
            expected[name] = shape
    head = next(row.name for row in mapping.TABLE[source.kind, spec.family] if row.path == "head/w")
    tied_head = spec.tied and head in infos
    if tied_head:  # not needed, but some checkpoints hold it
        expected[head] = expected[rows["embed/tokens"].name]
    found = {name: info.shape for name, info in infos.items()}
    stored, lines = mapping.mismatches(source.kind, spec.family, expected, found)
    wrong = [name for name in stored.values() if infos[name].dtype in np.sctypeDict and infos[name].dtype not in _FLOATS]
    wrong += [name for name in stored.values() if infos[name].dtype.startswith("float8")]
    if wrong:
        lines.append(f"no floating point (a quantised checkpoint?): {mapping.compress(wrong)}")
    if lines:
        raise UserError(
            f"{source.path}: the weights do not fit the config ({spec.family}, {spec.num_layers} layers): "
            f"{'; '.join(lines)}; give a complete checkpoint of this very model"
        )
    if tied_head and not _equal(reader, stored[head], stored[rows["embed/tokens"].name]):
        raise UserError(
            f"{source.path}: tie_word_embeddings is true (or implied), yet {head} differs from the embedding; "
            "set tie_word_embeddings to false in config.json if the head was trained on its own"
        )
    return stored


def _layer_names(row: mapping.Row, num_layers: int) -> list[str]:
    return [row.name.format(layer) for layer in range(num_layers)] if "{}" in row.name else [row.name]


def _equal(reader: Reader, first: str, second: str) -> bool:
    rows, columns = reader.names()[first].shape
    step = max(1, _CHUNK // columns)
    return all(
        np.array_equal(
            reader.rows(first, start, min(rows, start + step)), reader.rows(second, start, min(rows, start + step))
        )
        for start in range(0, rows, step)
    )


class _Filler:
    """Reads any block of one leaf. Blocks asked for twice (by devices that hold the same) are read once."""

    def __init__(self, reader: Reader, row: mapping.Row, stored: dict[str, str], leaf: Any, pool: ThreadPoolExecutor):
        self.reader, self.row, self.stored, self.leaf, self.pool = reader, row, stored, leaf, pool
        self.layered = row.path.startswith("layers/")
        self.blocks: dict[str, np.ndarray] = {}

    def __call__(self, index: tuple[slice, ...]) -> np.ndarray:
        bounds = tuple(slice(*part.indices(size)[:2]) for part, size in zip(index, self.leaf.shape))
        if str(bounds) not in self.blocks:
            self.blocks[str(bounds)] = self.read(bounds)
        return self.blocks[str(bounds)]

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """The block with these bounds, anew."""
        block = _aligned_empty(tuple(part.stop - part.start for part in index), self.leaf.dtype)
        inner = index[1:] if self.layered else index
        shape = self.leaf.shape[self.layered :]
        places = mapping.stored_places(self.row, shape, inner)
        jobs: list[tuple] = []
        for name, part in self._parts(index, block):
            matrix = part.reshape(len(places[0]), len(places[1]))
            view, rows, columns = (matrix.T, *places[::-1]) if self.row.transposed else (matrix, *places)
            jobs += [(name, view, _as_slice(columns), *chunk) for chunk in self._chunks(name, rows)]
        for _ in self.pool.map(lambda job: self._copy(*job), jobs):
            pass  # re-raises what a thread raised
        return block

    def _parts(self, index: tuple[slice, ...], block: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """(stored name, the part of the block that it fills)."""
        if not self.layered:
            yield self.stored[self.row.name], block
            return
        for offset, layer in enumerate(range(index[0].start, index[0].stop)):
            yield self.stored[self.row.name.format(layer)], block[offset]

    def _chunks(self, name: str, rows: np.ndarray) -> Iterator[tuple[int, int, slice | np.ndarray, slice | np.ndarray]]:
        """(start, stop, which of the rows read, where they go) for runs of stored rows that cover `rows`."""
        shape = self.reader.names()[name].shape
        if len(shape) == 1:
            yield 0, shape[0], slice(None), slice(None)
            return
        step = max(1, _CHUNK // shape[1])
        straight = isinstance(_as_slice(rows), slice)
        order = None if straight else np.argsort(rows)
        for start in range(int(rows.min()), int(rows.max()) + 1, step):
            stop = min(start + step, int(rows.max()) + 1)
            if straight:
                yield start, stop, slice(None), slice(start - rows[0], stop - rows[0])
            else:
                first, last = np.searchsorted(rows, (start, stop), sorter=order)
                yield start, stop, rows[order[first:last]] - start, order[first:last]

    def _copy(self, name, view, columns, start, stop, picked, targets) -> None:
        data = self.reader.rows(name, start, stop)
        if data.ndim == 1:
            data = data[None]
        view[targets] = data[:, columns][picked]


_TABLE_ROWS = 4096  # of a vocabulary's table, quantised at a time


def _encoded(fill: _Filler, path: str, kind: str) -> dict[str, np.ndarray]:
    """The quantised parts of a whole leaf: one layer, or some rows of a table, in float32 at a time."""
    shape, layered = fill.leaf.shape, path.startswith("layers/")
    step = 1 if layered else _TABLE_ROWS
    made: dict[str, np.ndarray] = {}
    for start in range(0, shape[0], step):
        part = slice(start, min(start + step, shape[0]))
        wide = fill.read((part, *(slice(0, size) for size in shape[1:])))
        parts = quantized.encode(wide[0] if layered else wide, quantized.input_axes(path), kind)
        for name, values in parts.items():
            values = values[None] if layered else values
            if name not in made:
                made[name] = _aligned_empty((shape[0], *values.shape[1:]), values.dtype)
            made[name][part] = values
    return made


def _as_slice(places: np.ndarray) -> slice | np.ndarray:
    """Consecutive places as a slice, which numpy takes without a copy."""
    return slice(int(places[0]), int(places[-1]) + 1) if np.all(np.diff(places) == 1) else places


def _place(fill: _Filler, leaf: Any, sharding: Any) -> jax.Array:
    if sharding is None:
        array = jax.device_put(fill((slice(None),) * len(leaf.shape)))
    else:
        array = jax.make_array_from_callback(leaf.shape, sharding, fill, dtype=leaf.dtype)
    return jax.block_until_ready(array)  # so that the host block can go before the next one comes


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array at a multiple of 64 bytes, which JAX's CPU backend takes over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size].view(dtype).reshape(shape)


def export_backbone(
    backbone: Tree,
    spec: DecoderSpec,
    directory: Path | str,
    dtype: jax.typing.DTypeLike | None = None,
    config: dict[str, Any] | None = None,
) -> None:
    """Writes model.safetensors and config.json under Hugging Face's names; the inverse of `load_backbone`.

        export_backbone(backbone, spec, "out")     # then transformers' AutoModelForCausalLM.from_pretrained("out")

    dtype: the type to store, by default the leaves'. At the type of the checkpoint that was loaded, every tensor comes out
    bit-identical. config: the original config.json's content, to keep what the spec does not know (token ids and names).
    Raises UserError where the directory cannot be written.
    """
    directory = Path(directory)
    leaves = flatten(backbone)
    stored_dtype = np.dtype(dtype if dtype is not None else leaves["embed/tokens"].dtype)
    rows = mapping.rows_for("directory", spec, flatten(abstract_params(spec, stored_dtype)))
    parts: dict[str, list[tuple[mapping.Row, int | None]]] = {}
    for row in sorted(rows.values(), key=lambda row: row.third or 0):
        for layer, name in enumerate(_layer_names(row, spec.num_layers)):
            parts.setdefault(name, []).append((row, layer if "{}" in row.name else None))
    infos = {name: TensorInfo(_exported_shape(rows_, leaves), stored_dtype.name) for name, rows_ in sorted(parts.items())}

    def value(name: str) -> np.ndarray:
        pieces = [_matrix(leaves[row.path], row, layer) for row, layer in parts[name]]
        whole = np.concatenate(pieces, axis=-1) if len(pieces) > 1 else pieces[0]
        if parts[name][0][0].transposed:
            whole = whole.T
        return whole.reshape(infos[name].shape).astype(stored_dtype)

    text = json.dumps((config or config_from_spec(spec)) | {"torch_dtype": stored_dtype.name}, indent=2) + "\n"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror or error}); choose another directory") from None
    safetensors.write(directory / "model.safetensors", infos, value)


def _exported_shape(parts: list[tuple[mapping.Row, int | None]], leaves: dict[str, Any]) -> tuple[int, ...]:
    row, layer = parts[0]
    return mapping.stored_shape(row, leaves[row.path].shape[layer is not None :])


def _matrix(leaf: Any, row: mapping.Row, layer: int | None) -> np.ndarray:
    """One layer of a leaf on the host as [in, out]."""
    if layer is not None:
        leaf = leaf[layer] if isinstance(leaf, np.ndarray) else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    return np.asarray(leaf).reshape(mapping.matrix_shape(row.path, leaf.shape))
