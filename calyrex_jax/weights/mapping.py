"""One two-way table between the names of a checkpoint's tensors and the paths of the parameter tree.

A row says which stored tensor is which leaf and how its two axes lie; everything else (shapes, head splits, the layer
axis) follows from the tree. Reading, writing and checking all run off these rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from calyrex_jax.backbones.spec import DecoderSpec


class Row(NamedTuple):
    """`name` is the stored tensor ({} stands for the layer), `path` the leaf.

    transposed   stored [out, in], as torch's Linear does; leaves are [in, out]
    third        the leaf is the 0th, 1st or 2nd third of the stored out axis (fused q, k, v)
    interleaved  the two halves of each head alternate row by row, as llama.cpp stores q and k of `llama`
    """

    name: str
    path: str
    transposed: bool = False
    third: int | None = None
    interleaved: bool = False


_DECODER = (
    Row("model.embed_tokens.weight", "embed/tokens"),
    Row("model.layers.{}.input_layernorm.weight", "layers/attn_norm/scale"),
    Row("model.layers.{}.self_attn.q_proj.weight", "layers/attn/w_q", transposed=True),
    Row("model.layers.{}.self_attn.k_proj.weight", "layers/attn/w_k", transposed=True),
    Row("model.layers.{}.self_attn.v_proj.weight", "layers/attn/w_v", transposed=True),
    Row("model.layers.{}.self_attn.o_proj.weight", "layers/attn/w_o", transposed=True),
    Row("model.layers.{}.self_attn.q_proj.bias", "layers/attn/b_q"),
    Row("model.layers.{}.self_attn.k_proj.bias", "layers/attn/b_k"),
    Row("model.layers.{}.self_attn.v_proj.bias", "layers/attn/b_v"),
    Row("model.layers.{}.self_attn.o_proj.bias", "layers/attn/b_o"),
    Row("model.layers.{}.post_attention_layernorm.weight", "layers/mlp_norm/scale"),
    Row("model.layers.{}.mlp.gate_proj.weight", "layers/mlp/w_gate", transposed=True),
    Row("model.layers.{}.mlp.up_proj.weight", "layers/mlp/w_up", transposed=True),
    Row("model.layers.{}.mlp.down_proj.weight", "layers/mlp/w_down", transposed=True),
    Row("model.layers.{}.mlp.gate_proj.bias", "layers/mlp/b_gate"),
    Row("model.layers.{}.mlp.up_proj.bias", "layers/mlp/b_up"),
    Row("model.layers.{}.mlp.down_proj.bias", "layers/mlp/b_down"),
    Row("model.norm.weight", "final_norm/scale"),
    Row("lm_head.weight", "head/w"),
)

# GPT-2's Conv1D stores [in, out], as the tree does, and q, k and v in one.
_GPT2 = (
    Row("transformer.wte.weight", "embed/tokens"),
    Row("transformer.wpe.weight", "embed/positions"),
    Row("transformer.h.{}.ln_1.weight", "layers/attn_norm/scale"),
    Row("transformer.h.{}.ln_1.bias", "layers/attn_norm/bias"),
    *(Row("transformer.h.{}.attn.c_attn.weight", f"layers/attn/w_{x}", third=i) for i, x in enumerate("qkv")),
    *(Row("transformer.h.{}.attn.c_attn.bias", f"layers/attn/b_{x}", third=i) for i, x in enumerate("qkv")),
    Row("transformer.h.{}.attn.c_proj.weight", "layers/attn/w_o"),
    Row("transformer.h.{}.attn.c_proj.bias", "layers/attn/b_o"),
    Row("transformer.h.{}.ln_2.weight", "layers/mlp_norm/scale"),
    Row("transformer.h.{}.ln_2.bias", "layers/mlp_norm/bias"),
    Row("transformer.h.{}.mlp.c_fc.weight", "layers/mlp/w_up"),
    Row("transformer.h.{}.mlp.c_fc.bias", "layers/mlp/b_up"),
    Row("transformer.h.{}.mlp.c_proj.weight", "layers/mlp/w_down"),
    Row("transformer.h.{}.mlp.c_proj.bias", "layers/mlp/b_down"),
    Row("transformer.ln_f.weight", "final_norm/scale"),
    Row("transformer.ln_f.bias", "final_norm/bias"),
    Row("lm_head.weight", "head/w"),
)

# llama.cpp's names are the same for all architectures.
_GGUF = (
    Row("token_embd.weight", "embed/tokens"),
    Row("position_embd.weight", "embed/positions"),
    Row("blk.{}.attn_norm.weight", "layers/attn_norm/scale"),
    Row("blk.{}.attn_norm.bias", "layers/attn_norm/bias"),
    *(Row(f"blk.{{}}.attn_{x}.weight", f"layers/attn/w_{x}", transposed=True) for x in "qkv"),
    *(Row(f"blk.{{}}.attn_{x}.bias", f"layers/attn/b_{x}") for x in "qkv"),
    Row("blk.{}.attn_output.weight", "layers/attn/w_o", transposed=True),
    Row("blk.{}.attn_output.bias", "layers/attn/b_o"),
    Row("blk.{}.ffn_norm.weight", "layers/mlp_norm/scale"),
    Row("blk.{}.ffn_norm.bias", "layers/mlp_norm/bias"),
    *(Row(f"blk.{{}}.ffn_{x}.weight", f"layers/mlp/w_{x}", transposed=True) for x in ("gate", "up", "down")),
    *(Row(f"blk.{{}}.ffn_{x}.bias", f"layers/mlp/b_{x}") for x in ("gate", "up", "down")),
    Row("output_norm.weight", "final_norm/scale"),
    Row("output_norm.bias", "final_norm/bias"),
    Row("output.weight", "head/w"),
)


def _gguf_rows(family: str) -> tuple[Row, ...]:
    rows = _GGUF
    if family == "gpt2":
        fused = [
            Row(f"blk.{{}}.attn_qkv.{kind}", f"layers/attn/{kind[0]}_{x}", transposed=kind == "weight", third=i)
            for kind in ("weight", "bias")
            for i, x in enumerate("qkv")
        ]
        rows = (*(row for row in rows if row.path not in {f.path for f in fused}), *fused)
    if family in ("llama", "mistral"):  # the architecture `llama`, whose rotary code pairs neighbours instead of halves
        rows = tuple(row._replace(interleaved=row.path[-3:] in ("w_q", "w_k", "b_q", "b_k")) for row in rows)
    return rows


_FAMILIES = ("llama", "qwen2", "mistral", "gpt2")
TABLE: dict[tuple[str, str], tuple[Row, ...]] = {
    **{("directory", family): _GPT2 if family == "gpt2" else _DECODER for family in _FAMILIES},
    **{("gguf", family): _gguf_rows(family) for family in _FAMILIES},
}

# A checkpoint of the bare model, without its head, leaves this prefix out.
_PREFIX = {"llama": "model.", "qwen2": "model.", "mistral": "model.", "gpt2": "transformer."}

# Buffers that old checkpoints store and that hold no weights: constant masks and rotary frequencies.
_BUFFERS = {
    ("directory", "gpt2"): re.compile(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"),
    **{
        ("directory", family): re.compile(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
        for family in ("llama", "qwen2", "mistral")
    },
    # turned into the config's rope_scaling, or refused, where the config is made
    ("gguf", "llama"): re.compile(r"rope_freqs\.weight"),
    ("gguf", "mistral"): re.compile(r"rope_freqs\.weight"),
}


def is_buffer(kind: str, family: str, name: str) -> bool:
    """Whether a stored tensor is one of the few that are no weights and may be passed over."""
    pattern = _BUFFERS.get((kind, family))
    return pattern is not None and pattern.fullmatch(name) is not None


def rows_for(kind: str, spec: DecoderSpec, paths: Iterable[str]) -> dict[str, Row]:
    """{path: row} for the leaves that this backbone has; `kind` is "directory" (Hugging Face names) or "gguf"."""
    table = {row.path: row for row in TABLE[kind, spec.family]}
    return {path: table[path] for path in paths}


def canonical_names(kind: str, family: str, names: Iterable[str]) -> dict[str, list[str]]:
    """{name as in the table: names as stored}: the model prefix, which a bare model's checkpoint lacks, is put back."""
    prefix = _PREFIX[family]
    known = {row.name.split("{}")[0] for row in TABLE[kind, family]}
    out: dict[str, list[str]] = {}
    for name in names:
        bare = kind == "directory" and not name.startswith(prefix) and any((prefix + name).startswith(k) for k in known)
        out.setdefault(prefix + name if bare else name, []).append(name)
    return out


def matrix_shape(path: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """A leaf's shape without its layer axis as [in, out]; norm scales and biases are [1, out].

    >>> matrix_shape("layers/attn/w_o", (9, 64, 576))
    (576, 576)
    """
    joined = input_axes(path)
    return int(np.prod(shape[:joined], dtype=np.int64)), int(np.prod(shape[joined:], dtype=np.int64))


def input_axes(path: str) -> int:
    """How many leading axes of a leaf (without its layer axis) are inputs of its map."""
    leaf = path.rsplit("/", 1)[-1]
    if leaf in ("scale", "bias") or leaf.startswith("b_"):
        return 0
    return 2 if leaf == "w_o" else 1


def stored_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored tensor's shape for a leaf of `shape` (without its layer axis).

    >>> stored_shape(Row("q", "layers/attn/w_q", transposed=True), (576, 9, 64))
    (576, 576)
    """
    rows, columns = matrix_shape(row.path, shape)
    columns *= 1 if row.third is None else 3
    if input_axes(row.path) == 0:
        return (columns,)
    return (columns, rows) if row.transposed else (rows, columns)


def stored_places(row: Row, shape: tuple[int, ...], index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Where in the stored tensor the block `index` of a leaf lies: its places on the in axis and on the out axis.

    >>> stored_places(Row("c", "layers/attn/b_k", third=1), (1, 2), (slice(0, 1), slice(0, 2)))[1]
    array([2, 3])
    """
    joined = input_axes(row.path)
    sizes = matrix_shape(row.path, shape)
    inner = np.arange(sizes[0]).reshape(shape[:joined])[index[:joined]].reshape(-1)
    outer = np.arange(sizes[1]).reshape(shape[joined:])[index[joined:]].reshape(-1)
    if row.interleaved:  # halves of a head, [2, H/2] in the tree, are stored as [H/2, 2]
        heads, width = shape[-2:]
        stored = np.arange(heads * width).reshape(heads, width // 2, 2).swapaxes(1, 2).reshape(-1)
        outer = stored[outer]
    if row.third is not None:
        outer = outer + row.third * sizes[1]
    return inner, outer


def compress(names: Iterable[str]) -> str:
    """Names for a message, layer numbers joined.

    >>> compress(["h.0.w", "h.1.w", "h.3.w", "x"])
    'h.{0-1,3}.w, x'
    """
    groups: dict[str, list[int]] = {}
    for name in names:
        match = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if match is None else f"{name[: match.start()]}{{}}{name[match.end() :]}"
        groups.setdefault(pattern, []).extend([] if match is None else [int(match.group())])
    return ", ".join(
        pattern if not numbers else pattern.replace("{}", _ranges(numbers)) for pattern, numbers in groups.items()
    )


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if len(numbers) == 1 else "{" + text + "}"


def mismatches(
    kind: str, family: str, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, str], list[str]]:
    """({expected name: stored name}, complaints): every missing, unexpected and misshapen tensor.

    expected and found give the shapes by name. Buffers (see `is_buffer`) are passed over.
    """
    canonical = canonical_names(kind, family, (name for name in found if not is_buffer(kind, family, name)))
    missing = [name for name in expected if name not in canonical]
    unexpected = [stored for name, names in canonical.items() if name not in expected for stored in names]
    twice = [" and ".join(names) for name, names in canonical.items() if name in expected and len(names) > 1]
    shapes: dict[str, list[str]] = {}
    for name, names in canonical.items():
        if name in expected and found[names[0]] != expected[name]:
            shapes.setdefault(f"(has {found[names[0]]}, expected {expected[name]})", []).append(names[0])
    lines = [f"{what}: {compress(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
    lines += [f"stored twice: {', '.join(twice)}"] if twice else []
    lines += [f"misshapen: {'; '.join(f'{compress(names)} {shape}' for shape, names in shapes.items())}"] if shapes else []
    return {name: names[0] for name, names in canonical.items() if name in expected}, lines
