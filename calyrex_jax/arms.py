"""What an ablation trains: arms, each a change of the config, with one run a seed.

    plan(config, spec, directory)      # the runs of config.ablate.arms, or of one arm a placement

Arms are written "name: field=value, field=value; name2: …" with fields as on the command line, such as cal.keys_from=all.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from ml_collections import ConfigDict

from calyrex_jax import makers
from calyrex_jax.adapters import cal, placement
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.config import as_dict, check
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.evals.tasks.api import numbers
from calyrex_jax.model import Model

# one backbone, one template and one evaluation for all arms; steps and seeds have their own fields
SHARED = ("backbone", "chat", "generate", "eval", "analyze", "plan", "mesh", "svgt")
OWN = ("ablate.seeds", "ablate.rates", "ablate.curve")  # of ablate, what an arm may have its own value of
_BETWEEN_FIELDS = re.compile(r",\s*(?=[\w.]+\s*=)")  # a value may hold commas: adapter.placement=26,28


@dataclass(frozen=True)
class Arm:
    """One run: its method, seed and config, where it trains, what it will have, and the steps at which it is judged."""

    method: str
    seed: int
    config: ConfigDict
    directory: Path
    boundaries: tuple[int, ...]
    parameters: int
    marks: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.directory.name


def plan(config: ConfigDict, spec: DecoderSpec, directory: Path) -> list[Arm]:
    """All runs in the order in which they are made: arms as listed, seed after seed; of placements those with lower first
    boundaries first, for frozen states of one are the start of the next ones'.

    Raises UserError for what no run could do: an unknown field, a name given twice, a budget too small.
    """
    wanted = variants(config, spec)
    listed = bool(config.ablate.arms)
    reference = wanted[config.ablate.reference] if listed else at(config, config.ablate.reference)
    with _told_of(config.ablate.reference, listed):
        budget = makers.cal_budget(reference, spec)
    found = []
    for name, variant in wanted.items():
        with _told_of(name, listed):
            found += _runs(name, variant, spec, directory, budget)
    if listed:
        return sorted(found, key=lambda arm: arm.seed)
    return sorted(found, key=lambda arm: (arm.boundaries[0], len(arm.boundaries), arm.seed))


@contextlib.contextmanager
def _told_of(name: str, listed: bool) -> Iterator[None]:
    """A user's mistake in an arm that was listed is told with its name."""
    try:
        yield
    except UserError as error:
        raise UserError(f"config.ablate.arms: {name}: {error}" if listed else str(error)) from None


def variants(config: ConfigDict, spec: DecoderSpec) -> dict[str, ConfigDict]:
    """{arm: its config}: of config.ablate.arms, else of the placements."""
    marks_of(config)
    if config.ablate.arms:
        return _changed(config)
    wanted = [name.strip() for name in config.ablate.placements.split(";") if name.strip()] or list(placement.PRESETS)
    if len({folder(name) for name in wanted}) < len(wanted):
        raise UserError(f"config.ablate.placements: {config.ablate.placements!r} names a placement twice; name each once")
    if not all(adapter.boundaries for adapter in makers.adapters(config, spec)) or config.adapter.name == "prompt_only":
        raise UserError(
            f"config.adapter.name={config.adapter.name}: an ablation moves blocks from boundary to boundary; "
            "name adapters with blocks, such as cal or parallel_mlp, or name arms in config.ablate.arms"
        )
    return {name: at(config, name) for name in wanted}


def _changed(config: ConfigDict) -> dict[str, ConfigDict]:
    if config.ablate.placements:
        raise UserError("config.ablate: arms and placements exclude each other; give an arm its own adapter.placement")
    found: dict[str, ConfigDict] = {}
    for entry in filter(None, (part.strip() for part in config.ablate.arms.split(";"))):
        name, _, changes = (part.strip() for part in entry.partition(":"))
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name in found or name == "frozen":
            raise UserError(
                f"config.ablate.arms: {entry!r} is not understood; write NAME: FIELD=VALUE, FIELD=VALUE; NAME2: … with "
                "different names of letters, digits, _ and -, none of them frozen"
            )
        found[name] = copy.deepcopy(config)
        found[name].eval.after_training = ""
        for change in filter(None, _BETWEEN_FIELDS.split(changes)):
            _set(found[name], change, f"config.ablate.arms: {name}")
        with _told_of(name, True):
            check(found[name])
    if not config.ablate.reference or config.ablate.reference not in found:
        raise UserError(
            f"config.ablate.reference={config.ablate.reference!r} is none of config.ablate.arms: {', '.join(found)}; "
            "name the arm that the others are compared with"
        )
    return found


def _set(config: ConfigDict, change: str, where: str) -> None:
    """Applies "field=value" as the command line would; UserError where it would refuse, or where arms must be alike."""
    field, equals, text = (part.strip() for part in change.partition("="))
    *groups, name = field.split(".")
    group = config
    for part in groups:
        group = group[part] if isinstance(group, ConfigDict) and part in group else None
    if not equals or not isinstance(group, ConfigDict) or name not in group or isinstance(group[name], ConfigDict):
        raise UserError(f"{where}: {change!r} is not understood; write FIELD=VALUE with a field of calyrex_jax/config.py")
    top = groups[0] if groups else ""  # a field outside any group is the program's
    if top in ("", *SHARED) or (top == "ablate" and field not in OWN) or field == "train.seed":
        raise UserError(f"{where}: {field} is the same for all arms; set --config.{field}")
    kind = type(group[name])
    try:
        group[name] = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError):
        raise UserError(f"{where}: {field}={text!r}, expected {kind.__name__}, such as {group[name]!r}") from None


def _runs(name: str, variant: ConfigDict, spec: DecoderSpec, directory: Path, budget: int) -> list[Arm]:
    """One arm's runs, a seed each."""
    if variant.adapter.name == "prompt_only" or set(variant.adapter.name.split("+")) & set(makers.FITTED):
        raise UserError(f"config.adapter.name={variant.adapter.name} is not trained; the frozen model is always compared")
    boundaries = placement.boundaries(variant.adapter.placement, spec.num_layers)
    model = Model(spec, makers.adapters(variant, spec))
    if variant.ablate.match == "parameters" and abs(_count(model) / budget - 1) > 0.01:
        size(variant, spec, len(boundaries), budget)
        model = Model(spec, makers.adapters(variant, spec))
    variant.data.token_dir = variant.data.token_dir or str(directory / "tokens")
    if variant.data.prefix_cache != "off":
        variant.data.prefix_dir = variant.data.prefix_dir or str(directory / "prefix")
        if model.first_boundary <= spec.num_layers // 8:
            variant.data.prefix_cache = "off"  # so few layers are run sooner than their states are read
    marks = marks_of(variant)
    rates_of(variant)
    variant.train.keep_steps = ",".join(map(str, marks))
    found = []
    for seed in range(variant.train.seed, variant.train.seed + variant.ablate.seeds):
        own = copy.deepcopy(variant)
        own.train.seed = seed
        found.append(Arm(name, seed, own, directory / f"{folder(name)}_s{seed}", boundaries, _count(model), marks))
    return found


def _count(model: Model) -> int:
    """Trained parameters."""
    return trees.count(jax.eval_shape(model.init_adapters, jax.random.key(0)))


def folder(name: str) -> str:
    """An arm's name as a directory's."""
    return name.replace(" ", "").replace(",", "-")


def marks_of(config: ConfigDict) -> tuple[int, ...]:
    """The steps of config.ablate.curve that lie within the run, and its last one; none without a curve."""
    if not config.ablate.curve:
        return ()
    steps = numbers(config.ablate.curve, "config.ablate.curve", 1, 10**9)
    if config.train.schedule != "constant":
        raise UserError(
            f"config.ablate.curve: with config.train.schedule={config.train.schedule} the rate falls towards the last step, so "
            "that an earlier checkpoint is no run of its own; set config.train.schedule=constant"
        )
    return (*(step for step in steps if step < config.train.steps), config.train.steps)


def rates_of(config: ConfigDict) -> tuple[float, ...]:
    """The learning rates of config.ablate.rates, ascending; UserError where they are no positive numbers."""
    try:
        found = sorted({float(part) for part in config.ablate.rates.split(",") if part.strip()})
    except ValueError:
        found = [0.0]
    if found and found[0] <= 0:
        raise UserError(f'config.ablate.rates is {config.ablate.rates!r}, expected learning rates such as "3e-4,1e-3,3e-3"')
    return tuple(found)


def trials(arm: Arm, directory: Path) -> dict[float, Arm]:
    """{rate: a run of config.ablate.rate_steps with it}: what a sweep trains for one arm; none where it has no rates."""
    found = {}
    for rate in rates_of(arm.config):
        config = copy.deepcopy(arm.config)
        config.train.learning_rate, config.train.steps = rate, config.ablate.rate_steps
        place = directory / f"{folder(arm.method)}_lr{rate:g}"
        found[rate] = Arm(arm.method, arm.seed, config, place, arm.boundaries, arm.parameters, ())
    return found


def at(config: ConfigDict, name: str) -> ConfigDict:
    """A copy of the config that trains at one placement and leaves the evaluation to the ablation."""
    found = copy.deepcopy(config)
    found.adapter.placement = name
    found.eval.after_training = ""
    return found


def size(config: ConfigDict, spec: DecoderSpec, blocks: int, budget: int) -> None:
    """Gives the blocks of a config the size with which all of them have `budget` parameters."""
    if config.cal.mlp_dim == -1:
        raise UserError(
            f"config.ablate.match=parameters: attention alone (cal.mlp_dim=-1) has no width to match {budget:,} parameters with; "
            "set cal.num_heads and cal.num_kv_heads to come within 1 %"
        )
    made = cal.sized(makers.make_cal(config, spec).config, blocks, budget)
    config.cal.num_heads, config.cal.num_kv_heads, config.cal.mlp_dim = made.num_heads, made.num_kv_heads, made.mlp_dim


def is_finished(arm: Arm) -> bool:
    """Whether an earlier command trained this very run to its end; of a curve's also beyond it, for its checkpoints stay."""
    try:
        report = json.loads((arm.directory / "report.json").read_text(encoding="utf-8"))
        config = json.loads((arm.directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    same = {group: fields for group, fields in as_dict(arm.config).items() if group not in ("eval", "ablate", "generate")}
    done, wanted = report.get("steps", 0), arm.config.train.steps
    if arm.marks and done > wanted and all((arm.directory / "checkpoints" / str(step)).is_dir() for step in arm.marks):
        length = {name: config.get("train", {}).get(name) for name in ("steps", "keep_steps")}
        return same | {"train": same["train"] | length} == {group: config.get(group) for group in same}
    return done == wanted and same.items() <= config.items()
