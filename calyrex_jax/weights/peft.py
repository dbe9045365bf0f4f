"""LoRA as PEFT keeps it on disk: adapter_config.json and adapter_model.safetensors, read strictly and written.

low_rank, leaves = load_peft("adapter/", spec)
save_peft("adapter/", spec, low_rank, leaves)
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.lowrank import FUSED, KINDS, LowRank, map_shapes
from calyrex_jax.core.types import Tree
from calyrex_jax.weights import safetensors
from calyrex_jax.weights.mapping import TABLE, mismatches
from calyrex_jax.weights.reader import TensorInfo

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_ROOT = "base_model.model."

# what is read, and what changes nothing here; any other field must be off
_READ = {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "bias"}
_READ |= {"layers_to_transform", "layers_pattern", "init_lora_weights", "lora_dropout"}
_HARMLESS = {"auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version"}
_HARMLESS |= {"fan_in_fan_out", "runtime_config", "megatron_core", "loftq_config", "eva_config", "corda_config"}
_HARMLESS |= {"lora_ga_config", "qalora_group_size", "exclude_modules", "ensure_weight_tying"}
# these leave the base weights as they were; the others (pissa, olora, …) move part of them into the adapter
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")


def shapes_of(spec: DecoderSpec) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """{kind: (input shape, output shape)} of every linear map of a layer, as the family stores them."""
    return map_shapes(abstract_params(spec, np.float32)["layers"], fused=FUSED in modules(spec))


def modules(spec: DecoderSpec) -> dict[str, str]:
    """{kind: Hugging Face module}, {} for the layer: `{"attn/w_q": "model.layers.{}.self_attn.q_proj", …}`."""
    found = {}
    for row in TABLE["directory", spec.family]:
        if row.path.startswith("layers/") and row.path.rsplit("/", 1)[1].startswith("w_"):
            kind = row.path.removeprefix("layers/") if row.third is None else FUSED
            found[kind] = row.name.removesuffix(".weight")
    return {kind: found[kind] for kind in KINDS if kind in found and (kind != "mlp/w_gate" or spec.gated)}


def target_kinds(spec: DecoderSpec, text: str) -> tuple[str, ...]:
    """The kinds of maps that `lora.targets` names, in the order of `lowrank.KINDS`: "all", or names joined by commas.

    A name is ours (`w_q`, `attn/w_q`) or the end of a Hugging Face module's (`q_proj`, `attn.c_proj`). UserError for any other.
    """
    table = modules(spec)
    if text.strip() == "all":
        return tuple(table)
    chosen: set[str] = set()
    for name in (part.strip() for part in text.split(",")):
        ours = {kind for kind in table if name in (kind, kind.rsplit("/", 1)[1])}
        theirs = {kind for kind, module in table.items() if name and f".{module}".endswith(f".{name}")}
        if not ours | theirs:
            known = ", ".join(f"{kind.rsplit('/', 1)[1]} ({_short(table, kind)})" for kind in table)
            raise UserError(f"lora.targets: {name!r} is no linear map of {spec.family}; known: all, {known}")
        chosen |= ours | theirs
    return tuple(kind for kind in table if kind in chosen)


def _short(table: dict[str, str], kind: str) -> str:
    """The shortest ending of a module's name that no other has: `q_proj`, or `attn.c_proj` beside `mlp.c_proj`."""
    parts = table[kind].split(".")
    for count in range(1, len(parts)):
        ending = ".".join(parts[-count:])
        if sum(f".{module}".endswith(f".{ending}") for module in table.values()) == 1:
            return ending
    return table[kind]


def save_peft(directory: str | os.PathLike, spec: DecoderSpec, low_rank: LowRank, leaves: Tree, base: str = "") -> None:
    """Writes adapter_config.json and adapter_model.safetensors (float32), which peft loads onto the same backbone.

    leaves are those of `adapters.lora`; `base` is the base model's name, for the record. Ranks that differ go into
    rank_pattern. UserError where the directory cannot be written.
    """
    directory, table, ranks = Path(directory), modules(spec), dict(low_rank.ranks)
    common = min(ranks.values())
    some = range(low_rank.first, low_rank.stop) != range(spec.num_layers)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": common,
        "lora_alpha": low_rank.alpha,
        "lora_dropout": low_rank.dropout,
        "use_rslora": low_rank.rslora,
        "rank_pattern": {_short(table, kind): rank for kind, rank in ranks.items() if rank != common},
        "alpha_pattern": {},
        "target_modules": [_short(table, kind) for kind in ranks],
        "layers_to_transform": list(range(low_rank.first, low_rank.stop)) if some else None,
        "fan_in_fan_out": spec.family == "gpt2",  # its Conv1D keeps weights as [in, out]; PEFT merges by it
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
    }
    values = {}
    for kind, rank in low_rank.ranks:
        room, leaf = kind.split("/")
        a, b = (np.asarray(leaves[room][leaf][part], np.float32) for part in "ab")
        for at, layer in enumerate(range(low_rank.first, low_rank.stop)):
            module = _ROOT + table[kind].format(layer)
            values[f"{module}.lora_A.weight"] = a[at].reshape(-1, rank).T
            values[f"{module}.lora_B.weight"] = b[at].reshape(rank, -1).T
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{directory}: cannot be written ({error.strerror}); choose another directory") from None
    infos = {name: TensorInfo(value.shape, "float32") for name, value in sorted(values.items())}
    safetensors.write(directory / TENSORS, infos, values.__getitem__)


def ranks_of(directory: str | os.PathLike, spec: DecoderSpec) -> LowRank:
    """What adapter_config.json says of an adapter for this backbone, without reading its tensors; errors as `load_peft`."""
    directory = Path(directory)
    config, table = _read_config(directory), modules(spec)
    targeted = {kind: _layers_of(config, module, spec.num_layers) for kind, module in table.items()}
    targeted = {kind: layers for kind, layers in targeted.items() if layers}
    if not targeted:
        raise UserError(f"{directory / CONFIG}: target_modules {config['target_modules']!r} name no map of {spec.family}")
    layers = next(iter(targeted.values()))
    if any(other != layers for other in targeted.values()) or layers != list(range(layers[0], layers[-1] + 1)):
        raise UserError(f"{directory / CONFIG}: the layers it changes are not one range, the same for all maps: {targeted}")
    ranks = {kind: _of_kind(config, "rank_pattern", "r", table[kind], layers, directory) for kind in targeted}
    alphas = {_of_kind(config, "alpha_pattern", "lora_alpha", table[kind], layers, directory) for kind in targeted}
    if len(alphas) > 1:
        raise UserError(f"{directory / CONFIG}: alpha_pattern gives several alphas, {sorted(alphas)}; one for all is kept")
    rates = bool(config.get("use_rslora")), float(config.get("lora_dropout") or 0.0)
    return LowRank(tuple(ranks.items()), alphas.pop(), layers[0], layers[-1] + 1, *rates)


def load_peft(directory: str | os.PathLike, spec: DecoderSpec) -> tuple[LowRank, Tree]:
    """What `save_peft` or peft itself saved for this backbone: its ranks, and its leaves as float32 numpy arrays.

    UserError where a file is absent, where the adapter is of another kind or asks for what is not computed here, and with
    every tensor that is missing, unexpected or misshapen.
    """
    directory = Path(directory)
    low_rank, table, shapes = ranks_of(directory, spec), modules(spec), shapes_of(spec)
    layers, expected = range(low_rank.first, low_rank.stop), {}
    if not (directory / TENSORS).is_file():
        raise UserError(f"{directory}: has {CONFIG} but no {TENSORS}; save the adapter with safe_serialization=True")
    reader = safetensors.SafetensorsReader([directory / TENSORS])

    def name(kind: str, layer: int, x: str) -> str:
        return f"{_ROOT}{table[kind].format(layer)}.lora_{x}.weight"

    for kind, rank in low_rank.ranks:
        inputs, outputs = (int(np.prod(shape)) for shape in shapes[kind])
        expected |= {name(kind, layer, "A"): (rank, inputs) for layer in layers}
        expected |= {name(kind, layer, "B"): (outputs, rank) for layer in layers}
    lines = mismatches("directory", spec.family, expected, {n: info.shape for n, info in reader.names().items()})[1]
    if lines:
        raise UserError(f"{directory / TENSORS}: does not fit {CONFIG} and this backbone: {'; '.join(lines)}")

    def stack(kind: str, x: str) -> np.ndarray:
        parts = ((stored, expected[stored][0]) for stored in (name(kind, layer, x) for layer in layers))
        return np.stack([np.asarray(reader.rows(stored, 0, rows), np.float32).T for stored, rows in parts])

    leaves: Tree = {}
    for kind, rank in low_rank.ranks:
        room, leaf = kind.split("/")
        inputs, outputs = shapes[kind]
        a, b = stack(kind, "A"), stack(kind, "B")
        made = {"a": a.reshape(len(layers), *inputs, rank), "b": b.reshape(len(layers), rank, *outputs)}
        leaves.setdefault(room, {})[leaf] = made
    return low_rank, leaves


def is_peft(directory: str | os.PathLike) -> bool:
    """Whether a directory holds an adapter of PEFT's and not a run of ours."""
    return (Path(directory) / CONFIG).is_file()


def _read_config(directory: Path) -> dict[str, Any]:
    where = directory / CONFIG
    try:
        config = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read as JSON ({error}); name a directory that PEFT saved") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UserError(f"{where}: not a LoRA adapter of PEFT (peft_type must be LORA)")
    lacking = [name for name in ("r", "lora_alpha", "target_modules") if not config.get(name)]
    on = [name for name, value in config.items() if name not in _READ | _HARMLESS and value]
    on += ["bias"] if config.get("bias", "none") != "none" else []
    on += ["init_lora_weights"] if config.get("init_lora_weights", True) not in _PLAIN_STARTS else []
    if lacking or on:
        said = [f"lacks {', '.join(lacking)}"] if lacking else []
        said += [f"sets {', '.join(f'{name}={config[name]!r}' for name in on)}, which is not computed here"] if on else []
        raise UserError(f"{where}: {'; '.join(said)}; only plain LoRA on linear maps is read")
    return config


def _layers_of(config: dict, module: str, num_layers: int) -> list[int]:
    """The layers in which PEFT would change the module: its names match whole or by their ending, a string as a pattern."""
    targets, chosen = config["target_modules"], config.get("layers_to_transform")
    chosen = [chosen] if isinstance(chosen, int) else chosen

    def hit(name: str) -> bool:
        if isinstance(targets, str):
            return targets == "all-linear" or re.fullmatch(targets, name) is not None
        return any(f".{name}".endswith(f".{target}") for target in targets)

    return [n for n in range(num_layers) if hit(module.format(n)) and (chosen is None or n in chosen)]


def _of_kind(config: dict, patterns: str, plain: str, module: str, layers: Iterable[int], directory: Path):
    """The one rank or alpha of a module in all its layers."""
    found = set()
    for layer in layers:
        keys = (key for key in config.get(patterns) or {} if re.match(rf"(.*\.)?({key})$", module.format(layer)))
        key = next(keys, None)
        found.add(config[plain] if key is None else config[patterns][key])
    if len(found) > 1:
        raise UserError(
            f"{directory / CONFIG}: {patterns} gives {module} {sorted(found)} in different layers; one value for all is kept"
        )
    return found.pop()
