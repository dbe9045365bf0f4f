"""`--mode=plan`: what a run needs before anything is bought: parameters, arithmetic, and bytes a device, by compiling it.

The programs are those that train and generate run, compiled ahead of time for config.plan.topology; no weights, no tokenizer
and no TPU are needed. Exit status 0 says that the plan was made; whether the run fits is `fits` in report.json.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from ml_collections import ConfigDict

from calyrex_jax import build
from calyrex_jax.backbones import decoder
from calyrex_jax.config import as_dict, check, prepare_workdir
from calyrex_jax.core import numerics, trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import bucket
from calyrex_jax.evals.report import text_table, write_json
from calyrex_jax.generate.batching import max_positions, rows_of
from calyrex_jax.model import Model
from calyrex_jax.planning import collectives, machine, programs
from calyrex_jax.planning.compiled import Figures, compile_program
from calyrex_jax.sharding import mesh as meshes
from calyrex_jax.training import flops

WHAT = ("train", "prefill", "decode")
_TRIES = 5  # changes that are compiled, at most, in search of one that fits


@dataclass(frozen=True)
class Setting:
    """One config on one machine."""

    config: ConfigDict
    machine: machine.Machine
    mesh: Mesh
    model: Model


def plan(config: ConfigDict, workdir: str) -> int:
    """Makes the plan; returns the exit status."""
    check(config)
    wanted = programs_wanted(config.plan.what)
    build.optimizer_config(config)
    where = machine.open_machine(config.plan.topology)
    setting = settle(config, where)
    made = {what: make_program(setting, what) for what in wanted}  # refuses what cannot work before anything is compiled
    directory = prepare_workdir(workdir)
    report = {
        "topology": where.name,
        "devices": len(where.devices),
        "mesh": dict(setting.mesh.shape),
        "figures": where.figures,
    }
    report |= arithmetic(setting)
    say(f"plan for {where.name}: {len(where.devices)} devices, {where.figures}")
    with numerics.compiling_for(where.platform):
        found = {what: compiled(setting, what, program) for what, program in made.items()}
        report["programs"] = {what: as_json(setting, made[what], found[what]) for what in wanted}
        if config.plan.suggest:
            for what in wanted:
                if not found[what].fits:
                    report["programs"][what]["suggestion"] = suggestion(setting, what, found[what])
    # the program that stands for the plan: training where it is among them, else the largest
    main = "train" if "train" in wanted else max(wanted, key=lambda what: found[what].peak)
    report |= {"device_bytes": report["programs"][main]["device_bytes"], "fits": all(f.fits for f in found.values())}
    write_json(directory / "config.json", as_dict(config))
    write_json(directory / "report.json", report)
    print(as_text(setting, report), flush=True)
    say(f"done: {directory / 'report.json'}")
    return 0


def say(line: str) -> None:
    """A line of progress."""
    print(line, file=sys.stderr, flush=True)


def programs_wanted(what: str) -> tuple[str, ...]:
    """config.plan.what as a tuple, in the order of WHAT."""
    names = {name.strip() for name in what.split(",") if name.strip()}
    if unknown := sorted(names - {*WHAT, "all"}) or ([] if names else [what]):
        raise UserError(
            f"config.plan.what: {unknown[0]!r} is not a program; name {', '.join(WHAT)}, joined by commas, or all"
        )
    return tuple(name for name in WHAT if name in names or "all" in names)


def settle(config: ConfigDict, where: machine.Machine) -> Setting:
    """The model and the mesh of a config; UserError where they do not go together."""
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor, where.devices)
    model = build.planned_model(config)
    build.check_attention(config, model.spec, where.platform)
    return Setting(config, where, mesh, model)


def make_program(setting: Setting, what: str) -> programs.Program:
    """The program, not yet traced."""
    config, model, mesh = setting.config, setting.model, setting.mesh
    with numerics.compiling_for(setting.machine.platform):
        backbone = build.abstract_weights(model.spec, jnp.dtype(config.backbone.dtype), config.backbone.quantize, mesh)
    if what == "train":
        if not model.adapters:
            raise UserError("config.adapter.name=prompt_only has nothing to train; set config.plan.what=prefill or decode")
        if model.svgt is not None:
            raise UserError("config.svgt.enabled: SVGT's stages are not planned; set config.plan.what=prefill,decode")
        build.check_batch(config, mesh)
        train, length = config.train, config.data.max_length
        check_length(setting, "config.data.max_length", length)
        return programs.train_step(
            model,
            mesh,
            backbone,
            build.optimizer_config(config),
            rows=train.batch_size,
            length=length,
            span=min(config.plan.span, length),
            accumulate=train.accumulate,
            chunk=train.loss_chunk,
            seed=train.seed,
            cached=is_cached(setting),
        )
    rows, prompt, new_tokens = generated_shape(setting, what)
    return programs.generation(
        model,
        mesh,
        backbone,
        rows=rows,
        prompt=prompt,
        new_tokens=new_tokens,
        span=min(config.plan.span, prompt),
        sampling=build.sampling(config),
    )


def is_cached(setting: Setting) -> bool:
    """Whether training reads the states at the first boundary from disk."""
    return setting.config.data.prefix_cache != "off" and setting.model.first_boundary > 0


def generated_shape(setting: Setting, what: str) -> tuple[int, int, int]:
    """(rows, tokens a prompt, new tokens) of generate's program in which prefill, or decode, is what counts."""
    plan, mesh = setting.config.plan, setting.mesh
    if what == "prefill":
        check_length(setting, "config.plan.prefill_length", plan.prefill_length)
        return rows_of(plan.prefill_batch, plan.prefill_batch, mesh), plan.prefill_length, 1
    check_length(setting, "config.plan.decode_context", plan.decode_context)
    prompt = min(bucket(1), plan.decode_context - 1)
    if prompt < 1:
        raise UserError("config.plan.decode_context=1 leaves no room for a prompt and a reply; set 2 or more")
    return rows_of(plan.decode_batch, plan.decode_batch, mesh), prompt, plan.decode_context - prompt


def check_length(setting: Setting, field: str, length: int) -> None:
    """UserError where a program would be longer than the backbone's positions."""
    if length > (most := max_positions(setting.model.spec)):
        raise UserError(f"{field}={length} is above the backbone's {most} positions; lower it")


def compiled(setting: Setting, what: str, program: programs.Program) -> Figures:
    """Compiles, and says how that went."""
    found = compile_program(program, setting.machine)
    fate = f"needs {gib(found.peak)} of {gib(found.limit)} a device" + ("" if found.fits else ": does not fit")
    say(f"{what}: compiled in {found.seconds:.0f} s; {fate}")
    return found


def arithmetic(setting: Setting) -> dict[str, Any]:
    """Parameters, and floating point operations of a training batch with what they allow at best."""
    config, model = setting.config, setting.model
    counts = {
        "frozen": trees.count(decoder.abstract_params(model.spec, jnp.float32)),
        "trainable": trees.count(jax.eval_shape(model.init_adapters, jax.random.key(0))),
    }
    rows, length = config.train.batch_size, config.data.max_length
    shape = (rows, length, min(config.plan.span, length))
    found = {"parameters": counts, "flops": {"forward": flops.forward_flops(model, *shape)}}
    if model.adapters:
        found["flops"]["step"] = flops.step_flops(model, *shape, cached=is_cached(setting))
        if setting.machine.flops:
            seconds = found["flops"]["step"] / setting.machine.flops / len(setting.machine.devices)
            found["ceiling"] = {"flops_per_second": setting.machine.flops, "steps_per_second": 1 / seconds}
            found["ceiling"]["tokens_per_second"] = rows * length / seconds
    return found


def as_json(setting: Setting, program: programs.Program, found: Figures) -> dict[str, Any]:
    """One program's part of report.json."""
    stacks = {
        path: leaf.shape
        for path, leaf in trees.flatten(decoder.abstract_params(setting.model.spec, jnp.float32)["layers"]).items()
        if "/w_" in path
    }
    return {
        "device_bytes": {
            "arguments": found.arguments,
            "temporaries": found.temporaries,
            "peak": found.peak,
            "limit": found.limit,
        },
        "fits": found.fits,
        "parts": program.parts,
        "compile_seconds": found.seconds,
        "collectives": collectives.summary(list(found.found)),
        "least_gathered": program.least,
        "gathered_stacks": collectives.gathered_stacks(list(found.found), stacks),
    } | ({"refusal": found.reason} if found.reason else {})


def suggestion(setting: Setting, what: str, found: Figures) -> dict[str, Any]:
    """The first change, from small to large, with which the program fits, by compiling it; {"change": None} where none does."""
    say(f"{what}: {gib(found.peak - found.limit)} too much a device; looking for the smallest change that fits")
    tried = []
    for fields in changes(setting, what):
        changed = ConfigDict(as_dict(setting.config))
        for field, value in fields.items():
            group, name = field.split(".")
            changed[group][name] = value
        shown = " ".join(f"--config.{field}={value}" for field, value in fields.items())
        try:
            other = settle(changed, setting.machine)
            program = make_program(other, what)
        except UserError:
            continue  # a mesh or a batch that the model does not divide over is no suggestion
        if program.parts["weights"] > found.limit:
            continue
        if len(tried) == _TRIES:
            break
        say(f"trying {shown}")
        figures = compiled(other, what, program)
        tried.append({"change": shown, "peak": figures.peak, "fits": figures.fits})
        if figures.fits:
            return {"change": shown, "peak": figures.peak, "tried": tried}
    return {"change": None, "tried": tried}


def changes(setting: Setting, what: str) -> Iterator[dict[str, Any]]:
    """Changes of the config that make a program smaller, the harmless ones first."""
    config, mesh = setting.config, setting.mesh
    if mesh.shape["data"] > 1:  # the backbone lies on every group of devices anew
        yield {"mesh.data": 1, "mesh.fsdp": mesh.shape["data"] * mesh.shape["fsdp"]}
    if what == "train":
        share = mesh.shape["data"] * mesh.shape["fsdp"]
        if config.train.remat != "layers":
            yield {"train.remat": "layers"}
        split = config.train.accumulate * 2
        while split * share <= config.train.batch_size:
            yield {"train.accumulate": split, "train.remat": "layers"}
            split *= 2
        yield from fewer_bits(config)
        if config.train.batch_size > share * config.train.accumulate:
            yield {"train.batch_size": config.train.batch_size // 2, "train.remat": "layers"}
        return
    rows, length = ("prefill_batch", "prefill_length") if what == "prefill" else ("decode_batch", "decode_context")
    least = mesh.shape["data"] * mesh.shape["fsdp"]
    yield from fewer_bits(config)
    if config.plan[rows] > least:
        yield {f"plan.{rows}": max(config.plan[rows] // 2, least)}
    yield {f"plan.{length}": config.plan[length] // 2}


def fewer_bits(config: ConfigDict) -> Iterator[dict[str, Any]]:
    """Quantisations of the backbone below the present one."""
    for kind in {"": ("int8", "int4"), "int8": ("int4",)}.get(config.backbone.quantize, ()):
        yield {"backbone.quantize": kind}


def gib(size: int | None) -> str:
    """Bytes for people: "4.40 GiB"."""
    if size is None:
        return "unknown"
    return f"{size / (1 << 30):.2f} GiB" if abs(size) >= 1 << 28 else f"{size / (1 << 20):.1f} MiB"


def as_text(setting: Setting, report: dict[str, Any]) -> str:
    """The plan for the terminal."""
    config, counts, work = setting.config, report["parameters"], report["flops"]
    shape = " ".join(f"{axis}={size}" for axis, size in report["mesh"].items())
    lines = [
        f"{config.backbone.source} in {config.backbone.dtype}, adapter {config.adapter.name} at {config.adapter.placement}",
        f"{report['topology']}: {report['devices']} devices, mesh {shape}; figures of the {report['figures']}",
        f"parameters: {counts['frozen']:,} frozen, {counts['trainable']:,} trained",
        f"a batch of {config.train.batch_size} × {config.data.max_length} tokens: forward {work['forward'] / 1e12:,.2f} TFLOP"
        + (f", step {work['step'] / 1e12:,.2f} TFLOP ({work['step'] / work['forward']:.2f})" if "step" in work else ""),
    ]
    if "ceiling" in report:
        best = report["ceiling"]
        lines.append(
            f"ceiling at {best['flops_per_second'] / 1e12:,.0f} TFLOP/s a device: {best['steps_per_second']:,.3g} steps/s, "
            f"{best['tokens_per_second']:,.0f} tokens/s"
        )
    names = list(report["programs"])
    rows: list[list[Any]] = []
    for part in ("weights", "adapters", "optimizer", "batch", "cache", "logits"):
        cells = [report["programs"][name]["parts"].get(part) for name in names]
        if any(cell is not None for cell in cells):
            rows.append([part, *(None if cell is None else gib(cell) for cell in cells)])
    for part in ("arguments", "temporaries", "peak", "limit"):
        rows.append([part, *(gib(report["programs"][name]["device_bytes"][part]) for name in names)])
    rows.append(["fits", *("yes" if report["programs"][name]["fits"] else "no" for name in names)])
    lines += ["", text_table(["bytes a device", *names], rows)]
    moved = [
        [f"{name}: {kind}", entry["count"], entry["runs"], gib(entry["bytes"])]
        for name in names
        for kind, entry in report["programs"][name]["collectives"].items()
    ]
    if moved:
        lines += ["", text_table(["collectives", "operations", "runs", "left on a device"], moved)]
    for name in names:
        lines += remarks(name, report["programs"][name])
    return "\n".join(lines)


def remarks(name: str, entry: dict[str, Any]) -> list[str]:
    """What has to be said of a program beside its figures."""
    lines = []
    if stacks := entry["gathered_stacks"]:
        lines.append(f"{name}: gathers the whole stack of {', '.join(stacks)} on every device")
    gathered = entry["collectives"].get("all-gather", {}).get("bytes", 0)
    if gathered and entry["least_gathered"]:
        least = entry["least_gathered"]
        lines.append(f"{name}: gathers {gathered / least:.2f} times what each layer once a pass would be ({gib(least)})")
    if not entry["fits"]:
        over = entry["device_bytes"]["peak"] - entry["device_bytes"]["limit"]
        lines.append(f"{name}: does not fit, by {gib(over)} a device")
    if (found := entry.get("suggestion")) is not None:
        if found["change"]:
            lines.append(f"{name}: fits with {found['change']}, at {gib(found['peak'])} (compiled)")
        else:
            lines.append(
                f"{name}: none of the {len(found['tried'])} changes that were compiled makes it fit; take more devices"
            )
    return lines
