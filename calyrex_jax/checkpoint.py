"""Checkpoints by Orbax: each adapter, the optimiser, the data order and the config, saved in the background, atomically.

    saved = Checkpoints(workdir / "checkpoints", keep=3, config=resolved)
    saved.save(100, trainable, optimizer_state, {"batches": batches.get_state()})
    saved.wait()                                                   # at the end: a failed background save surfaces here
    step, trainable, optimizer_state, data_state = saved.restore(trainable, optimizer_state)

All methods are collective: with several processes, every one calls them in the same order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as preserve

from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree

# Orbax warns of what is deliberate here (reading only, restoring some items) and prints a traceback for each thread of a
# failed save; the failure itself is raised by the next save() or by wait().
logging.getLogger("absl").addFilter(lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname)

# The storage library reports a full disk or a lost mount as ValueError("RESOURCE_EXHAUSTED: …").
STORAGE_FAULT = re.compile(
    r"(RESOURCE_EXHAUSTED|PERMISSION_DENIED|NOT_FOUND|UNAVAILABLE|DATA_LOSS|FAILED_PRECONDITION|UNKNOWN): "
)

ADAPTER = "adapter_"  # the item of adapter NAME, so that each can be restored without the others

# Fields whose change makes a saved state another thing: groups by name, or single fields.
BACKBONE_FIELDS = ("backbone.source", "backbone.quantize")
OPTIMIZER_FIELDS = tuple(
    f"train.{name}"
    for name in (
        "learning_rate",
        "schedule",
        "warmup_steps",
        "final_fraction",
        "weight_decay",
        "clip_norm",
        "beta2",
        "freeze",
    )
)
# what an adapter started from, and how it is used, is no property of the trained one
START_FIELDS = frozenset(
    {
        "cal.init",
        "svgt.enabled",
        "svgt.stages",
        "svgt.refresh_every",
        "svgt.momentum",
        "svgt.step",
        "svgt.strength",
        "iti.strength",
        "re_control.strength",
        "re_control.steps",
    }
)
# the fields that a trained adapter must be used with, where not all of its group
PROPERTIES = {
    "svgt": tuple(
        f"svgt.{name}"
        for name in (
            "layer",
            "value_dim",
            "num_heads",
            "pooling",
            "aggregate",
            "causal",
            "steering",
            "num_bridge_tokens",
            "num_bridge_heads",
        )
    )
}
RESUME_FIELDS = (*BACKBONE_FIELDS, "adapter.name", "adapter.placement", *OPTIMIZER_FIELDS)
# what decides which leaves an adapter has and how large they are; baselines take their size from CAL's fields
SHAPE_FIELDS = ("adapter.placement", "cal")


def _leaves(config: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(config, dict):
        return {path: config}
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= _leaves(value, f"{path}.{name}" if path else str(name))
    return found


def _comparable(field: str, value: Any) -> Any:
    # A model that moved to another directory is the same model: the last part of its name tells models apart.
    if field == "backbone.source" and isinstance(value, str):
        return value.rstrip("/").replace(":", "/").split("/")[-1]
    return list(value) if isinstance(value, tuple) else value


def config_differences(saved: dict, current: dict, fields: Sequence[str]) -> list[str]:
    """The fields that differ, one line each; `fields` names single fields ("train.beta2") or whole groups ("cal").

    A field that one side lacks (it came or went with a version) is not a difference, nor what an adapter started from.

        >>> config_differences({"cal": {"keys": "span"}}, {"cal": {"keys": "all"}}, ["cal"])
        ["config.cal.keys was 'span' and is 'all'"]
    """
    old, new = _leaves(saved), _leaves(current)
    return [
        f"config.{path} was {old[path]!r} and is {new[path]!r}"
        for path in sorted((old.keys() & new.keys()) - START_FIELDS)
        if any(path == field or path.startswith(f"{field}.") for field in fields)
        and _comparable(path, old[path]) != _comparable(path, new[path])
    ]


def _abstract(tree: Tree) -> Tree:
    """Shapes, types and shardings to restore into: never those that the saving run happened to have."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), tree)


def _first_line(error: BaseException) -> str:
    if "No space left on device" in str(error) and not isinstance(error, OSError):
        return "No space left on device"
    line = (getattr(error, "strerror", None) or str(error) or type(error).__name__).strip().splitlines()[0]
    return line.split(" [tensorstore_spec")[0][:240]  # a kilobyte of storage settings helps nobody


def _kept(keep: int, steps: Sequence[int]) -> preserve.PreservationPolicy:
    return preserve.AnyPreservationPolicy([preserve.LatestN(keep), preserve.CustomSteps(tuple(steps))])


class Checkpoints:
    """The checkpoints of one run, newest last.

    directory  made where absent, unless keep is None
    keep       how many finished checkpoints stay; None: only reads, changes nothing
    config     the run's resolved config, saved with each checkpoint and compared on restore
    keep_steps  steps whose checkpoints stay beside the newest `keep`

    An interrupted save is never seen, for a checkpoint counts once it was renamed into place; the first save clears it.
    Raises UserError for a directory that cannot be written.
    """

    def __init__(self, directory: str | os.PathLike, keep: int | None, config: dict, keep_steps: Sequence[int] = ()):
        self.directory = Path(directory).expanduser().resolve()  # Orbax fails in the background on a relative path
        self.config = config
        self._manager: ocp.CheckpointManager | None = None
        reads = keep is None
        if reads and not self.directory.is_dir():
            return
        with self._as_user_error("cannot be opened"):
            if not reads:
                self.directory.mkdir(parents=True, exist_ok=True)
                if not os.access(self.directory, os.W_OK | os.X_OK):
                    raise PermissionError(13, "Permission denied")
            options = ocp.CheckpointManagerOptions(
                preservation_policy=None if reads else _kept(keep, keep_steps),
                create=False,
                read_only=reads,
                cleanup_tmp_directories=not reads,
                enable_async_checkpointing=True,
            )
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    @contextlib.contextmanager
    def _as_user_error(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and not STORAGE_FAULT.match(str(error)):
                raise
            raise UserError(
                f"checkpoint: {self.directory} {what}: {_first_line(error)}; a writable directory with space is needed; "
                "free the disk or choose another --workdir"
            ) from error

    def latest_step(self) -> int | None:
        """The newest finished checkpoint's step, or None."""
        return None if self._manager is None else self._manager.latest_step()

    def steps(self) -> list[int]:
        """The steps of all finished checkpoints, ascending."""
        return [] if self._manager is None else sorted(self._manager.all_steps())

    def save(self, step: int, trainable: Tree, opt_state: Tree, data_state: dict, force: bool = False) -> bool:
        """Starts saving in the background; the arrays may be donated at once. False where `step` is saved already.

        trainable   {adapter: tree}; opt_state: any tree of arrays; data_state: JSON values
        force       save even where the manager's own interval would skip this step

        Raises UserError where the disk lacks the space, or where the previous save failed.
        """
        if self._manager is None:
            raise ValueError(f"{self.directory} was opened for reading only")
        if step in self._manager.all_steps():
            return False
        with self._as_user_error("cannot be written"):
            need, free = trees.num_bytes(trainable) + trees.num_bytes(opt_state), shutil.disk_usage(self.directory).free
            if need > free:
                raise OSError(28, f"No space left on device ({need / 1e6:.1f} MB needed, {free / 1e6:.1f} MB free)")
            items = {ADAPTER + name: ocp.args.StandardSave(tree) for name, tree in trainable.items()}
            return self._manager.save(
                step,
                args=ocp.args.Composite(
                    **items,
                    optimizer=ocp.args.StandardSave(opt_state),
                    data=ocp.args.JsonSave(data_state),
                    config=ocp.args.JsonSave(self.config),
                ),
                force=force,
            )

    def wait(self) -> None:
        """Returns when everything is on disk. Raises UserError where a background save failed."""
        if self._manager is not None:
            with self._as_user_error("cannot be written"):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits and ends Orbax's threads."""
        if self._manager is not None:
            self.wait()
            self._manager.close()

    def saved_config(self, step: int | None = None) -> dict:
        """The config that the checkpoint (by default the newest) was saved with."""
        return self._restore(step, config=ocp.args.JsonRestore())[1]["config"]

    def restore(self, trainable: Tree, opt_state: Tree) -> tuple[int, Tree, Tree, dict]:
        """(step, trainable, opt_state, data_state) of the newest checkpoint, in the shapes, types and shardings given.

        Raises UserError where the optimiser or the adapter was configured otherwise, naming each changed field.
        """
        groups = tuple(trainable)
        changed = config_differences(self.saved_config(), self.config, (*RESUME_FIELDS, *groups))
        if changed:
            raise UserError(
                f"checkpoint in {self.directory}: {'; '.join(changed)}; set it back, use a new --workdir, or keep the "
                "adapter and start the optimiser afresh with --config.train.reset_optimizer=True"
            )
        step, found = self._restore_adapters(
            trainable, optimizer=ocp.args.StandardRestore(_abstract(opt_state)), data=ocp.args.JsonRestore()
        )
        return step, {name: found[ADAPTER + name] for name in trainable}, found["optimizer"], found["data"]

    def restore_without_optimizer(self, trainable: Tree) -> tuple[int, Tree, dict]:
        """(step, trainable, data_state) of the newest checkpoint: for a run whose optimiser starts afresh."""
        step, found = self._restore_adapters(trainable, data=ocp.args.JsonRestore())
        return step, {name: found[ADAPTER + name] for name in trainable}, found["data"]

    def restore_trainable(self, trainable: Tree, step: int | None = None) -> tuple[int, Tree]:
        """(step, adapters) of the newest checkpoint, or of `step`: those named in `trainable`, though the run may have more.

        Raises UserError where they were trained on another backbone or with other fields of their own.
        """
        fields = [field for name in trainable for field in PROPERTIES.get(name, (name,))]
        changed = config_differences(self.saved_config(step), self.config, (*BACKBONE_FIELDS, *fields))
        if changed:
            raise UserError(f"checkpoint in {self.directory}: {'; '.join(changed)}; set it back to use these adapters")
        step, found = self._restore_adapters(trainable, step)
        return step, {name: found[ADAPTER + name] for name in trainable}

    def _restore_adapters(
        self, trainable: Tree, step: int | None = None, **others: ocp.args.CheckpointArgs
    ) -> tuple[int, dict]:
        step = self._newest() if step is None else step
        self._match_adapters(trainable, step)
        items = {ADAPTER + name: ocp.args.StandardRestore(_abstract(tree)) for name, tree in trainable.items()}
        return self._restore(step, **items, **others)

    def _match_adapters(self, trainable: Tree, step: int) -> None:
        """UserError with every adapter, leaf and shape that the checkpoint of `step` has otherwise than `trainable`."""
        names = sorted(path.name.removeprefix(ADAPTER) for path in (self.directory / str(step)).glob(f"{ADAPTER}*"))
        lines = [f"it has no adapter {name} (it has {', '.join(names)})" for name in trainable if name not in names]
        for name in trainable:
            if name in names:
                stored = self._shapes(step, name)
                lines += trees.match({name: trainable[name]}, {name: stored}, "it")
        if lines:
            fields = SHAPE_FIELDS if set(trainable) <= set(names) else ("adapter.name", *SHAPE_FIELDS)
            changed = config_differences(self.saved_config(step), self.config, fields)
            if changed:
                raise UserError(
                    f"checkpoint of step {step} in {self.directory} does not fit the adapter of this config: "
                    f"{'; '.join(changed)}; set it back or use another --workdir"
                )
            shown = "; ".join(lines[:6]) + (f"; and {len(lines) - 6} more" if len(lines) > 6 else "")
            raise UserError(
                f"checkpoint of step {step} in {self.directory} does not fit the adapter of this config: {shown}; "
                "give the config it was trained with (backbone, adapter.name, adapter.placement, its own fields) "
                "or another --workdir"
            )

    def _shapes(self, step: int, name: str) -> Tree:
        with self._readable(step):
            return ocp.StandardCheckpointHandler().metadata(self.directory / str(step) / (ADAPTER + name)).tree

    def _newest(self) -> int:
        step = self.latest_step()
        if step is None:
            raise UserError(
                f"checkpoint: {self.directory} holds no finished checkpoint; train first or name another --workdir"
            )
        return step

    @contextlib.contextmanager
    def _readable(self, step: int) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"checkpoint of step {step} in {self.directory} cannot be read ({_first_line(error)}); if it is "
                f"damaged, delete {self.directory / str(step)} to go on from the one before"
            ) from error

    def _restore(self, step: int | None, **items: ocp.args.CheckpointArgs) -> tuple[int, dict]:
        step = self._newest() if step is None else step
        with self._readable(step):
            return step, dict(self._manager.restore(step, args=ocp.args.Composite(**items)).items())
