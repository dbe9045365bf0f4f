"""From a config to the objects of a run: the last room in which a ConfigDict is seen.

config.check(c)
run = build.open_run(c)                  # spec, tokenizer, model: cheap, and refuses what cannot work
backbone = build.load_weights(run)       # streamed onto the mesh
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from calyrex_jax import checkpoint, metrics
from calyrex_jax.adapters import lora
from calyrex_jax.backbones import decoder, kernels, named
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import as_dict
from calyrex_jax.core import numerics, quantized, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree
from calyrex_jax.data.chat import ChatPolicy
from calyrex_jax.data.tokenizer import Tokenizer, load_tokenizer
from calyrex_jax.generate.sampling import Sampling
from calyrex_jax.makers import init_from, make_model
from calyrex_jax.model import Model
from calyrex_jax.sharding import mesh as meshes
from calyrex_jax.sharding import rules
from calyrex_jax.training.optimizer import OptimizerConfig
from calyrex_jax.weights import peft
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import ModelSource, resolve, resolve_config


@dataclass(frozen=True)
class Run:
    """What all modes share; nothing here is mutable."""

    config: ConfigDict
    source: ModelSource
    spec: DecoderSpec
    tokenizer: Tokenizer
    policy: ChatPolicy
    model: Model
    mesh: Mesh
    dtype: jnp.dtype

    @property
    def stored_as(self) -> str:
        """How the frozen weights are kept, as far as results depend on it: "bfloat16", "bfloat16 int8"."""
        return f"{self.dtype} {self.config.backbone.quantize}".strip()

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a reply, the end-of-turn token of the template in use among them."""
        template = self.tokenizer.template(self.policy.chat_template, self.policy.date_string)
        return self.tokenizer.stop_ids_for(template)


def open_run(config: ConfigDict) -> Run:
    """Everything but the weights. Raises UserError for whatever the config names that cannot be had."""
    source = resolve(config.backbone.source)
    spec = DecoderSpec.from_config(source.config, str(source.path))
    chat = config.chat
    policy = ChatPolicy(
        system_role=chat.system_role,
        chat_template=chat_template(chat.template),
        date_string=chat.date_string,
        special_text=chat.special_text,
    )
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    check_attention(config, spec, numerics.platform())
    model = make_model(config, spec)
    tokenizer = load_tokenizer(source.path, source.kind, source.generation_config, source.config)
    return Run(config, source, spec, tokenizer, policy, model, mesh, jnp.dtype(config.backbone.dtype))


def planned_model(config: ConfigDict) -> Model:
    """The model without its weights or tokenizer: by the packaged specs where the source is one of theirs."""
    source = config.backbone.source
    known = None if Path(source).expanduser().exists() else named.known_as(source)
    spec = named.named_spec(known) if known else DecoderSpec.from_config(resolve_config(source), source)
    return make_model(config, spec)


def check_attention(config: ConfigDict, spec: DecoderSpec, platform: str) -> None:
    """UserError where config.attention names a kernel that cannot work for this backbone on `platform`."""
    kernels.check_attention(config.attention, platform, spec.head_dim, jnp.dtype(config.backbone.dtype))


def check_batch(config: ConfigDict, mesh: Mesh) -> None:
    """UserError where a training batch does not divide over devices and microbatches."""
    rows = mesh.shape["data"] * mesh.shape["fsdp"] * config.train.accumulate
    if config.train.batch_size % rows:
        raise UserError(
            f"config.train.batch_size={config.train.batch_size} does not divide over mesh.data × mesh.fsdp × train.accumulate "
            f"= {rows}; choose a multiple of {rows}"
        )


def chat_template(name: str) -> str | None:
    """config.chat.template as ChatPolicy takes it: a file's Jinja text, "plain", or None for the tokenizer's own."""
    if name in ("", "plain"):
        return name or None
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config.chat.template: {name} cannot be read ({error}); name a Jinja file, or plain") from None


def optimizer_config(config: ConfigDict) -> OptimizerConfig:
    """config.train as the optimiser takes it; UserError for a value out of range."""
    train = config.train
    return OptimizerConfig(
        learning_rate=float(train.learning_rate),
        steps=train.steps,
        schedule=train.schedule,
        warmup_steps=train.warmup_steps,
        final_fraction=float(train.final_fraction),
        weight_decay=float(train.weight_decay),
        clip_norm=float(train.clip_norm),
        beta2=float(train.beta2),
        freeze=tuple(name.strip() for name in train.freeze.split(",") if name.strip()),
    )


def notices(run: Run, distilled: bool) -> list[str]:
    """What is allowed but may not be meant, one line each; `distilled`: the corpus has targets of the frozen model."""
    train, changed, found = run.config.train, run.model.lora, []
    if train.warmup_steps > train.steps:
        found.append(
            f"config.train.warmup_steps={train.warmup_steps} is above config.train.steps={train.steps}: the whole run is warm-up "
            f"and ends at {train.steps / train.warmup_steps:.2g} of the peak learning rate; lower warmup_steps for a full schedule"
        )
    if run.config.data.prefix_cache != "off" and run.model.first_boundary == 0:
        found.append(
            "config.data.prefix_cache is not used: the adapters begin at the first layer, so there is no frozen prefix to keep"
        )
    if changed is not None and distilled:
        found.append(
            f"distilled conversations run the frozen layers from {run.model.first_boundary} on once more beside LoRA's, for "
            "what is learned from is the model without it"
        )
    return found


def sampling(config: ConfigDict) -> Sampling:
    """config.generate as sampling takes it; UserError for a value out of range."""
    g = config.generate
    return Sampling(temperature=float(g.temperature), top_k=g.top_k, top_p=float(g.top_p), seed=g.seed)


def _shapes(spec: DecoderSpec, dtype: jnp.dtype, quantize: str, mesh: Mesh) -> tuple[Tree, Tree]:
    """The backbone's shapes, and where each leaf lies."""
    abstract = quantized.abstract(decoder.abstract_params(spec, dtype), quantize)
    return abstract, rules.shardings(abstract, rules.BACKBONE_RULES, mesh)


def abstract_weights(spec: DecoderSpec, dtype: jnp.dtype, quantize: str, mesh: Mesh) -> Tree:
    """What `load_weights` gives, as shapes with shardings."""
    abstract, placed = _shapes(spec, dtype, quantize, mesh)
    where = trees.flatten(placed)

    def leaf(path: str, like: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        kept = numerics.storage_type(like.dtype) if path.startswith("layers/") else like.dtype
        return jax.ShapeDtypeStruct(like.shape, kept, sharding=where[path])

    return trees.map_with_path(leaf, abstract)


def load_weights(run: Run, show: metrics.Metrics | None = None) -> Tree:
    """The frozen backbone on the mesh, in its own type; the stack of layers in that type's `numerics.storage_type`."""
    kind = run.config.backbone.quantize
    _, placed = _shapes(run.spec, run.dtype, kind, run.mesh)
    leaves = trees.flatten(load_backbone(run.source, run.spec, run.dtype, placed, kind=kind))
    for path in leaves:  # one by one, so that no second stack exists
        if path.startswith("layers/"):
            leaves[path] = numerics.stored(leaves[path])
    return trees.unflatten(leaves)


def fresh_adapters(run: Run) -> Tree:
    """The trainable tree as initialised, on the mesh."""
    make = run.model.init_adapters
    key = jax.random.PRNGKey(run.config.train.seed)
    placed = rules.shardings(jax.eval_shape(make, key), rules.ADAPTER_RULES, run.mesh)
    return jax.jit(make, out_shardings=placed)(key)


def brought_adapters(run: Run, backbone: Tree | None = None) -> Tree:
    """The trainable tree: fresh, but for what config.adapter.init_from brings from other runs ("cal=DIR,lora=DIR").

    With `backbone`, for training, config.cal.init is obeyed: what CAL blocks take over from their neighbouring layers.
    """
    tree = fresh_adapters(run)
    if backbone is not None and run.config.cal.init == "layer" and "cal" in tree:
        tree["cal"] = taken_over(run.spec, backbone["layers"], tree["cal"])
    for name, directory in init_from(run.config).items():
        if name not in tree or not directory:
            raise UserError(
                f"config.adapter.init_from: {f'{name}={directory}'!r} is not understood; write NAME=DIR with NAME one of "
                f"{', '.join(tree) or 'none'}"
            )
        if name == "lora" and peft.is_peft(directory):
            leaves = peft.load_peft(directory, run.spec)[1]
            tree[name] = jax.tree.map(lambda leaf, like: jax.device_put(leaf, like.sharding), leaves, tree[name])
        else:
            tree[name] = restored(run, Path(directory), {name: tree[name]})[1][name]
    return tree


def export_peft(run: Run, leaves: Tree, directory: str | Path) -> None:
    """Writes a run's LoRA leaves as PEFT keeps them: `export_peft(run, trained_adapters(run, workdir)["lora"], "out")`."""
    [adapter] = [adapter for adapter in run.model.adapters if isinstance(adapter, lora.Lora)]
    peft.save_peft(directory, run.spec, adapter.low_rank, jax.device_get(leaves), run.config.backbone.source)


def taken_over(spec: DecoderSpec, layers: Tree, blocks: Tree) -> Tree:
    """CAL blocks {boundary_26: …} that start from W_Q, W_K, W_V and the norm of the frozen layer behind each boundary.

    The last boundary takes the last layer. W_O and W_D stay zero, so nothing else changes at initialisation.
    """
    found = {}
    for key, block in blocks.items():
        layer = min(int(key.removeprefix("boundary_")), spec.num_layers - 1)
        # a block with fewer heads takes the first ones
        taken = {name: _taken(layers["attn"][name], layer)[:, : block[name].shape[1]] for name in ("w_q", "w_k", "w_v")}
        taken["attn_norm"] = _taken(layers["attn_norm"]["scale"], layer)
        found[key] = block | {n: jax.device_put(v.astype(block[n].dtype), block[n].sharding) for n, v in taken.items()}
    return found


def _taken(stack: Tree, layer: int) -> jax.Array:
    one = jax.tree.map(lambda leaf: numerics.take_layer(leaf, layer), stack)
    return quantized.decoded(one, jnp.float32) if quantized.is_quantized(one) else one


def restored(run: Run, workdir: Path, like: Tree, at: int | None = None) -> tuple[int, Tree]:
    """(step, adapters) from a run's newest checkpoint, or the one of step `at`; SVGT from its latest stage's best one.

    Raises UserError where there is none, or where it was trained with another backbone, placement or block.
    """
    step, found = 0, {}
    for place, part in _places(workdir, like):
        saved = None if place is None else _reading(run, place)
        if saved is None or saved.latest_step() is None:
            missing = "stage of SVGT" if place is None else f"checkpoint in {place}"
            raise UserError(f"{workdir}: no finished {missing}; train there first or name another directory")
        step, leaves = saved.restore_trainable(part, None if "svgt" in part else at)
        found |= leaves
    return step, {name: found[name] for name in like}


def _places(workdir: Path, like: Tree) -> list[tuple[Path | None, Tree]]:
    """Where a run's directory has the adapters of `like`, and which of them; None for SVGT where no stage is finished."""
    others = {name: tree for name, tree in like.items() if name != "svgt"}
    places: list[tuple[Path | None, Tree]] = [(workdir / "checkpoints", others)] if others else []
    return [*places, (latest_stage(workdir), {"svgt": like["svgt"]})] if "svgt" in like else places


def latest_stage(workdir: Path, up_to: int = 3) -> Path | None:
    """The directory of the best checkpoint of the last stage of SVGT's curriculum, `up_to` at most, that has one."""
    found = (workdir / f"stage{number}" / "best" for number in range(up_to, 0, -1))
    return next((place for place in found if place.is_dir() and any(p.name.isdigit() for p in place.iterdir())), None)


def _reading(run: Run, place: Path) -> checkpoint.Checkpoints:
    return checkpoint.Checkpoints(place, keep=None, config=as_dict(run.config))


def is_trained(run: Run, workdir: Path) -> bool:
    """Whether a run's directory has a checkpoint of any of its parts."""
    places = [place for place, _ in _places(workdir, {part.name: None for part in run.model.parts})]
    return any(place is not None and _reading(run, place).latest_step() is not None for place in places)


def trained_adapters(run: Run, workdir: Path) -> Tree:
    """What score, generate and eval use: the newest checkpoint in `workdir`, or the adapter as initialised, said in one line."""
    tree = brought_adapters(run)
    brought = init_from(run.config)
    for place, part in _places(workdir, tree):
        names = "+".join(part)
        if place is not None and (saved := _reading(run, place)).latest_step() is not None:
            step, leaves = saved.restore_trainable(part)
            tree |= leaves
            shown = workdir if place.parent == workdir else place.parent
            print(f"adapter {names}: checkpoint of step {step} in {shown}", file=sys.stderr, flush=True)
        elif not brought:
            print(f"adapter {names}: no checkpoint in {workdir}; running it as initialised", file=sys.stderr, flush=True)
    return tree
