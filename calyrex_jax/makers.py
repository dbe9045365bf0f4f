"""The adapters that a config names: each field's meaning, sizes matched to CAL's, and what cannot go together."""

from __future__ import annotations

import jax
from ml_collections import ConfigDict

from calyrex_jax.adapters import cal, iti, lora, parallel_mlp, placement, re_control, svgt
from calyrex_jax.adapters.api import Adapter
from calyrex_jax.adapters.value_bridge import BridgeConfig, InjectionConfig
from calyrex_jax.adapters.value_space import ValueSpaceConfig
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.lowrank import LowRank
from calyrex_jax.model import Model
from calyrex_jax.weights import peft

FITTED = ("iti", "re_control")  # adapters that fit.py fits; train.py trains the others


def make_model(config: ConfigDict, spec: DecoderSpec) -> Model:
    """The decoder with the adapters, and the guidance, that a config names."""
    guide = make_svgt(config, spec) if config.svgt.enabled else None
    remat = config.train.remat == "layers"
    return Model(spec, adapters(config, spec), guide, remat=remat, attention=config.attention)


def adapters(config: ConfigDict, spec: DecoderSpec) -> tuple[Adapter, ...]:
    """The adapters that config.adapter.name lists, joined by "+"; at one boundary they act in that order."""
    names = [name.strip() for name in config.adapter.name.split("+")]
    unknown = [name for name in names if name not in (*MAKERS, "prompt_only")]
    if unknown:
        raise UserError(
            f"config.adapter.name is {config.adapter.name!r}; known: {', '.join(MAKERS)}, several joined by +, and prompt_only"
        )
    if len(set(names)) != len(names) or ("prompt_only" in names and len(names) > 1):
        raise UserError(f"config.adapter.name={config.adapter.name!r}: name each adapter once, and prompt_only alone")
    if {"lora", "iti"} <= set(names):
        raise UserError(f"config.adapter.name={config.adapter.name!r}: lora and iti both change layers; name one of them")
    return () if names == ["prompt_only"] else tuple(MAKERS[name](config, spec) for name in names)


def make_cal(config: ConfigDict, spec: DecoderSpec) -> cal.Cal:
    """The CAL adapter for a backbone: its head layout unless the config has another, and the placement's boundaries."""
    block = cal.CalConfig(
        embed_dim=spec.embed_dim,
        num_heads=config.cal.num_heads or spec.num_heads,
        num_kv_heads=config.cal.num_kv_heads or spec.num_kv_heads,
        head_dim=spec.head_dim,
        mlp_dim=0 if config.cal.mlp_dim == -1 else config.cal.mlp_dim or cal.default_mlp_dim(spec.embed_dim),
        norm_eps=spec.norm_eps,
        keys=config.cal.keys_from,
        gate_mlp_by_span=config.cal.gate_mlp_by_span,
        copy=config.cal.copying,
        rope_theta=config.cal.rope_theta if config.cal.rope else None,
        qk_norm=config.cal.qk_norm,
    )
    return cal.Cal(block, placement.boundaries(config.adapter.placement, spec.num_layers))


def cal_budget(config: ConfigDict, spec: DecoderSpec) -> int:
    """Trainable parameters of CAL with this config's cal and placement, which the baselines match."""
    return trees.count(jax.eval_shape(make_cal(config, spec).init, jax.random.key(0)))


def make_parallel_mlp(config: ConfigDict, spec: DecoderSpec) -> parallel_mlp.ParallelMlp:
    """The ParallelMLP adapter at the placement's boundaries, as wide as its field says or as large as CAL would be."""
    where = placement.boundaries(config.adapter.placement, spec.num_layers)
    width = config.parallel_mlp.mlp_dim or parallel_mlp.matched_width(cal_budget(config, spec), len(where), spec.embed_dim)
    block = parallel_mlp.ParallelMlpConfig(spec.embed_dim, width, spec.norm_eps, config.parallel_mlp.gate_by_span)
    return parallel_mlp.ParallelMlp(block, where)


def make_lora(config: ConfigDict, spec: DecoderSpec) -> lora.Lora:
    """The LoRA adapter: ranks as given, as large as CAL would be, or those of the PEFT directory that init_from names."""
    c, shapes = config.lora, peft.shapes_of(spec)
    directory = init_from(config).get("lora", "")
    theirs = peft.ranks_of(directory, spec) if directory and peft.is_peft(directory) else None
    kinds, layers = peft.target_kinds(spec, c.targets), lora.layer_range(c.layers, spec.num_layers)
    if c.rank:
        ranks = dict.fromkeys(kinds, c.rank)
    elif theirs is not None:
        ranks = {kind: dict(theirs.ranks).get(kind, 1) for kind in kinds}
    else:
        ranks = lora.matched_ranks(cal_budget(config, spec), shapes, kinds, len(layers))
    alpha = float(c.alpha) or (16.0 if c.rslora else 2.0 * min(ranks.values()))
    made = LowRank(tuple(ranks.items()), alpha, layers.start, layers.stop, c.rslora, float(c.dropout))
    if theirs is not None:
        agree(theirs, made, directory)
    return lora.Lora(made, tuple(shapes.items()))


def agree(theirs: LowRank, ours: LowRank, directory: str) -> None:
    """UserError with the first field of config.lora that says otherwise than a PEFT directory, and what to set it to."""
    kinds = tuple(dict(theirs.ranks))
    fields = {
        "targets": (kinds, tuple(dict(ours.ranks)), ",".join(kind.rsplit("/", 1)[1] for kind in kinds)),
        "layers": ((theirs.first, theirs.stop), (ours.first, ours.stop), f"{theirs.first}-{theirs.stop - 1}"),
        "rank": (theirs.ranks, ours.ranks, "0"),
        "rslora": (theirs.rslora, ours.rslora, str(theirs.rslora)),
        "alpha": (theirs.alpha, ours.alpha, f"{theirs.alpha:g}"),
    }
    for name, (saved, asked, value) in fields.items():
        if saved != asked:
            raise UserError(
                f"config.lora.{name} gives {asked}, but {directory} was saved with {saved}; set config.lora.{name}={value}"
            )


def make_iti(config: ConfigDict, spec: DecoderSpec) -> iti.Iti:
    """ITI on all layers."""
    return iti.Iti(range(spec.num_layers), spec.embed_dim, float(config.iti.strength))


def make_re_control(config: ConfigDict, spec: DecoderSpec) -> re_control.ReControl:
    """RE-Control where SVGT would read the stream."""
    c = config.re_control
    return re_control.ReControl((svgt_layer(config, spec) + 1,), spec.embed_dim, c.width, c.steps, float(c.strength))


def svgt_layer(config: ConfigDict, spec: DecoderSpec) -> int:
    """l*, from 0; UserError where the backbone has no such layer, or none above it."""
    layer = svgt.default_layer(spec.num_layers) if config.svgt.layer == -1 else config.svgt.layer
    svgt.check_layer(layer, spec.num_layers)
    return layer


def make_svgt(config: ConfigDict, spec: DecoderSpec) -> svgt.Svgt:
    """SVGT on a backbone; UserError for what cannot work with it or with the other adapters."""
    c = config.svgt
    if "cal" in config.adapter.name and config.cal.keys_from == "all":
        raise UserError(
            "config.cal.keys_from=all cannot be guided: its keys would hold every bridge that ever was; set cal.keys_from=span"
        )
    layer = svgt_layer(config, spec)
    value = ValueSpaceConfig(
        embed_dim=spec.embed_dim,
        value_dim=c.value_dim,
        num_heads=c.num_heads,
        pooling=c.pooling,
        aggregate=c.aggregate,
        causal=c.causal,
        step=float(c.step),
        dropout=float(c.dropout),
    )
    if c.steering == "inject":
        bridge = InjectionConfig(spec.embed_dim, c.value_dim, float(c.strength))
    else:
        bridge = BridgeConfig(spec.embed_dim, c.value_dim, c.num_bridge_tokens, c.num_bridge_heads or spec.num_heads)
    return svgt.Svgt(value, bridge, layer, c.refresh_every, float(c.momentum))


MAKERS = {
    "cal": make_cal,
    "parallel_mlp": make_parallel_mlp,
    "lora": make_lora,
    "iti": make_iti,
    "re_control": make_re_control,
}


def init_from(config: ConfigDict) -> dict[str, str]:
    """{adapter: directory} of config.adapter.init_from."""
    entries = (part.strip().partition("=") for part in config.adapter.init_from.split(",") if part.strip())
    return {name: directory for name, _, directory in entries}
