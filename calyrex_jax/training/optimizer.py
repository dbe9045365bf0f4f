"""AdamW for the trainable subtree: schedule, clipping, weight decay on matrices only, strict freezing by path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import optax

from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Tree


@dataclass(frozen=True)
class OptimizerConfig:
    """learning_rate is the peak; warmup_steps are linear from 0; steps is the whole run (cosine ends there).

    freeze names adapters (the first part of a path) that are loaded but not trained.
    """

    learning_rate: float
    steps: int
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 0
    final_fraction: float = 0.1
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.999
    freeze: tuple[str, ...] = ()

    def __post_init__(self):
        checks = {
            "learning_rate": (self.learning_rate > 0, "above 0"),
            "steps": (self.steps >= 1, "at least 1: a run of zero steps would train nothing"),
            "schedule": (self.schedule in ("cosine", "constant"), "'cosine' or 'constant'"),
            "warmup_steps": (self.warmup_steps >= 0, "0 or more"),
            "final_fraction": (0 <= self.final_fraction <= 1, "between 0 and 1"),
            "weight_decay": (self.weight_decay >= 0, "0 or more"),
            "clip_norm": (self.clip_norm >= 0, "0 (no clipping) or more"),
            "beta1": (0 <= self.beta1 < 1, "in [0, 1)"),
            "beta2": (0 <= self.beta2 < 1, "in [0, 1)"),
        }
        for field, (good, expected) in checks.items():
            if not good:
                raise UserError(f"train.{field}: got {getattr(self, field)!r}, expected {expected}")


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Step -> learning rate: linear warm-up, then cosine to `final_fraction` of the peak, or constant."""
    peak, warm = config.learning_rate, config.warmup_steps
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, max(config.steps - warm, 1), alpha=config.final_fraction)
    if not warm:
        return after
    # from 1/warm rather than 0: a first step at rate 0 would do nothing
    return optax.join_schedules([lambda step: peak * (step + 1) / warm, after], [warm])


def make_optimizer(config: OptimizerConfig, trainable: Tree) -> optax.GradientTransformation:
    """The masked update: Adam state exists for what is trained, frozen adapters get exact zeros and no state.

    Norm scales and biases (fewer than two axes) never decay.
    """
    roots = set(trainable)
    unknown = [name for name in config.freeze if name not in roots]
    if unknown:
        raise UserError(f"train.freeze: {unknown[0]!r} is not an adapter of this run; there are {', '.join(sorted(roots))}")
    if roots <= set(config.freeze):
        raise UserError("train.freeze: every adapter is frozen; leave at least one to train")
    labels = trees.map_with_path(lambda path, _: "frozen" if path.split("/")[0] in config.freeze else "trained", trainable)

    def decays(tree: Tree) -> Tree:
        # optax masks frozen subtrees out; tree.map keeps their place, a tree rebuilt from paths would lose it
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)

    adamw = optax.adamw(
        learning_rate(config), b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay, mask=decays
    )
    clipped = optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw) if config.clip_norm else adamw
    # multi_transform and not masked: optax.masked would pass raw gradients through to what it leaves out
    return optax.multi_transform({"trained": clipped, "frozen": optax.set_to_zero()}, labels)
