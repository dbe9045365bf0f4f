"""SVGT's curriculum as pure parts: who is trained in which stage, the steps of stages 1 and 2, the losses of stage 3.

    1  the unconditional encoder and D on single texts; binary cross-entropy
    2  the conditional path on prompts and responses: its own parts fast, those of stage 1 slowly
    3  the bridge alone, on safe responses

    optimizer = make_optimizer(StageConfig(stage=2, learning_rate=5e-4, old_learning_rate=1e-5), trainable)
    step = jax.jit(make_judge_step(svgt, optimizer, stage=2), donate_argnums=0)
    state, metrics = step(init_state(optimizer, trainable), examples)

The trainable tree is {"svgt": {"value_space": …, "bridge": …}} in every stage. Stages 1 and 2 need the backbone's states at
l* and nothing else of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import optax

from calyrex_jax.adapters.svgt import Svgt
from calyrex_jax.adapters.value_space import STAGE_1_KEYS, STAGE_2_KEYS
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import Array, Tree
from calyrex_jax.training.optimizer import OptimizerConfig, learning_rate
from calyrex_jax.training.step import TrainState, advanced

STAGES = (1, 2, 3)
FROZEN = "frozen"


@dataclass(frozen=True)
class StageConfig:
    """learning_rate is that of what the stage adds, old_learning_rate (stage 2 alone) of what stage 1 trained.

    warmup_steps are linear from 0, after which the rates are constant; clip_norm 0 is no clipping.
    """

    stage: int
    learning_rate: float
    old_learning_rate: float = 1e-5
    weight_decay: float = 1e-5
    clip_norm: float = 1.0
    warmup_steps: int = 0

    def __post_init__(self):
        if self.stage not in STAGES:
            raise UserError(f"config.svgt.stages: stage {self.stage!r} is not known; the curriculum has stages 1, 2 and 3")
        own = f"stage{self.stage}."
        checks = {
            own + "learning_rate": (self.learning_rate, self.learning_rate > 0, "above 0"),
            own + "old_learning_rate": (self.old_learning_rate, self.old_learning_rate > 0, "above 0"),
            own + "clip_norm": (self.clip_norm, self.clip_norm >= 0, "0 (no clipping) or more"),
            own + "warmup_steps": (self.warmup_steps, self.warmup_steps >= 0, "0 or more"),
            "weight_decay": (self.weight_decay, self.weight_decay >= 0, "0 or more"),
        }
        for field, (value, good, expected) in checks.items():
            if not good:
                raise UserError(f"config.svgt.{field}: got {value!r}, expected {expected}")


def labels(stage: int, trainable: Tree) -> Tree:
    """ "new", "old" or "frozen" for every leaf, by its path; ValueError for a leaf that no stage knows.

    >>> labels(2, {"svgt": {"value_space": {"discriminator": 0.0, "conditional": 0.0}, "bridge": 0.0}})
    {'svgt': {'bridge': 'frozen', 'value_space': {'conditional': 'new', 'discriminator': 'old'}}}
    """
    table = {1: ("new", FROZEN, FROZEN), 2: ("old", "new", FROZEN), 3: (FROZEN, FROZEN, "new")}[stage]

    def one(path: str, _) -> str:
        match path.split("/"):
            case ["svgt", "value_space", name, *_] if name in STAGE_1_KEYS:
                return table[0]
            case ["svgt", "value_space", name, *_] if name in STAGE_2_KEYS:
                return table[1]
            case ["svgt", "bridge", *_]:
                return table[2]
        raise ValueError(f"training: leaf {path} belongs to no stage of SVGT's curriculum; name it in value_space.py")

    return trees.map_with_path(one, trainable)


def make_optimizer(config: StageConfig, trainable: Tree) -> optax.GradientTransformation:
    """AdamW of one stage: two rates, one clipping over all that is trained, exact zeros and no state for the rest.

    Only matrices, seeds and the pooling query decay.
    """
    found = labels(config.stage, trainable)

    def adamw(rate: float) -> optax.GradientTransformation:
        schedule = OptimizerConfig(rate, steps=1, schedule="constant", warmup_steps=config.warmup_steps)
        return optax.adamw(learning_rate(schedule), weight_decay=config.weight_decay, mask=_decays)

    # before the clipping: what is frozen must not count in the norm. optax.masked leaves the others' gradients as they are
    parts = [optax.masked(optax.set_to_zero(), jax.tree.map(lambda label: label == FROZEN, found))]
    if config.clip_norm:
        parts.append(optax.clip_by_global_norm(config.clip_norm))
    rates = {"new": adamw(config.learning_rate), "old": adamw(config.old_learning_rate), FROZEN: optax.set_to_zero()}
    return optax.chain(*parts, optax.multi_transform(rates, found))


def _decays(tree: Tree) -> Tree:
    # optax masks subtrees out; this keeps their place, a tree rebuilt from paths would lose it
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "seeds", "pool"), tree)


@flax.struct.dataclass
class Examples:
    """Judged texts of stages 1 and 2, as states at l*.

    response       [B, T, D]; with a prompt, its first state is that of the prompt's last position
    response_mask  [B, T] bool, padding on any side; a row without any position fills the batch and counts nowhere
    labels         [B] float32, 1 harmful, 0 safe
    prompt, prompt_mask  [B, P, D] and [B, P], or None: the unconditional path
    """

    response: Array
    response_mask: Array
    labels: Array
    prompt: Array | None = None
    prompt_mask: Array | None = None


def prefix_scores(svgt: Svgt, trainable: Tree, examples: Examples, key: Array | None = None) -> tuple[Array, Array]:
    """s after every position of the responses, and where it means something: [B, T], [B, T] bool; T is 1 without causality."""
    space, params, e = svgt.value_space, trainable["svgt"]["value_space"], examples
    z = space.values(params, e.response, e.response_mask, e.prompt, e.prompt_mask, key)
    mask = jnp.asarray(e.response_mask)
    return space.score(params, z), mask if svgt.value.causal else mask.any(-1, keepdims=True)


def last(values: Array, mask: Array) -> jax.Array:
    """The value at the last true position of each row: [B, T], [B, T] -> [B]; the last one of all where none is true."""
    index = mask.shape[1] - 1 - jnp.argmax(mask[:, ::-1], axis=1)
    return jnp.take_along_axis(values, index[:, None], axis=1)[:, 0]


def row_means(values: Array, mask: Array) -> jax.Array:
    """The mean over each row's true positions, 0 where there is none: [B, T], [B, T] -> [B]."""
    return jnp.where(mask, values, 0.0).sum(-1) / jnp.maximum(mask.sum(-1), 1)


def judge_loss(scores: Array, mask: Array, labels: Array, dense: bool) -> tuple[Array, Array]:
    """Binary cross-entropy summed over examples, and their number: of every prefix, averaged for each example, or of the whole."""
    surprise = optax.sigmoid_binary_cross_entropy(scores, jnp.broadcast_to(labels[:, None], scores.shape))
    rows = row_means(surprise, mask) if dense else last(surprise, mask)
    real = mask.any(-1)
    return jnp.where(real, rows, 0.0).sum(), real.sum().astype(jnp.float32)


def make_judge_step(svgt: Svgt, optimizer: optax.GradientTransformation, stage: int, *, dense: bool = True, seed: int = 0):
    """`step(state, examples) -> (state, metrics)` of stages 1 and 2; jit it with `state` donated.

    dense    the label at every prefix of a response (this project's reading), or at its end alone
    seed     of dropout, whose key is folded from it and the step
    metrics  loss, grad_norm (of what is trained, before clipping), accuracy (at the responses' ends), examples, skipped
             (non-finite steps in a row)
    """

    def step(state: TrainState, examples: Examples):
        key = jax.random.fold_in(jax.random.key(seed), state.step) if svgt.value.dropout else None

        def objective(trainable: Tree):
            scores, mask = prefix_scores(svgt, trainable, examples, key)
            total, count = judge_loss(scores, mask, examples.labels, dense)
            right = mask.any(-1) & ((last(scores, mask) > 0) == (examples.labels > 0.5))
            return total / jnp.maximum(count, 1), (right.sum() / jnp.maximum(count, 1), count)

        (loss, (accuracy, count)), grads = jax.value_and_grad(objective, has_aux=True)(state.trainable)
        norm = trained_norm(stage, grads)
        state = advanced(optimizer, state, grads, jnp.isfinite(loss) & jnp.isfinite(norm))
        metrics = {"loss": loss, "grad_norm": norm, "accuracy": accuracy, "examples": count, "skipped": state.skipped}
        return state, metrics

    return step


def trained_norm(stage: int, grads: Tree) -> Array:
    """The gradients' norm over what a stage trains."""
    kinds = trees.flatten(labels(stage, grads))
    return optax.global_norm([g for path, g in trees.flatten(grads).items() if kinds[path] != FROZEN])


def make_judge(svgt: Svgt):
    """`judge(trainable, examples) -> s [B]` of whole responses, without dropout; to be jitted."""

    def judge(trainable: Tree, examples: Examples) -> Array:
        return last(*prefix_scores(svgt, trainable, examples))

    return judge


@dataclass(frozen=True)
class BridgeLoss:
    """λ_ce · CE + λ_safe · safety + λ_reg · regulariser of stage 3.

    safe_loss  "dense": safety at every position from the trigger on (this project's reading), averaged for each example;
               "last": at the last one alone (as in the published code)
    tolerance  how far |B| / |h_v| may be from 1 at no cost
    """

    ce: float = 0.5
    safe: float = 2.0
    reg: float = 0.1
    safe_loss: Literal["dense", "last"] = "dense"
    tolerance: float = 0.2

    def __post_init__(self):
        if self.safe_loss not in ("dense", "last"):
            raise UserError(f"config.svgt.safe_loss: {self.safe_loss!r} is not known; use 'dense' or 'last'")
        for name in ("ce", "safe", "reg"):
            if getattr(self, name) < 0:
                raise UserError(f"config.svgt.lambda_{name}: got {getattr(self, name)}, expected 0 or more")

    def __call__(
        self, bridge: Array, h_v: Array, scores: Array, mask: Array, ce_sum: Array, ce_count: Array
    ) -> tuple[Array, dict[str, Array]]:
        """The loss and its parts: ce, safety, regulariser, norm_ratio (mean |B| / |h_v|) and harm (mean probability).

        bridge [B, K, D], h_v [B, D]; scores [B, T] after each position, mask [B, T] those from the trigger on; ce_sum and
        ce_count over the batch's targets. A row whose mask is empty fills the batch and counts nowhere.
        """
        real = mask.any(-1)
        count = jnp.maximum(real.sum(), 1)

        def mean(rows: Array) -> Array:
            return jnp.where(real, rows, 0.0).sum() / count

        pressure = jax.nn.softplus(scores) + 2 * jax.nn.relu(scores)
        safety = mean(row_means(pressure, mask) if self.safe_loss == "dense" else last(pressure, mask))
        ratio = _norm(bridge) / _norm(h_v)[:, None]
        regulariser = mean(jax.nn.relu(jnp.abs(ratio - 1) - self.tolerance).mean(-1))
        ce = ce_sum / jnp.maximum(ce_count, 1)
        parts = {
            "ce": ce,
            "safety": safety,
            "regulariser": regulariser,
            "norm_ratio": mean(ratio.mean(-1)),
            "harm": mean(row_means(jax.nn.sigmoid(scores), mask)),
        }
        return self.ce * ce + self.safe * safety + self.reg * regulariser, parts


def _norm(x: Array) -> Array:
    # a root's slope at zero is infinite
    return jnp.sqrt(jnp.maximum(jnp.square(x.astype(jnp.float32)).sum(-1), 1e-12))
