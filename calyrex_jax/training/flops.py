"""Arithmetic of a step, counted on the traced program: XLA's own figure counts a scanned layer once.

step_flops(model, rows=4, length=256, span=32) / forward_flops(model, rows=4, length=256, span=32)      # 1.38
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.interpreters import partial_eval

from calyrex_jax.backbones import decoder
from calyrex_jax.core.types import Batch, Tree
from calyrex_jax.model import Model
from calyrex_jax.training.step import init_state, make_train_step


def count(fn: Callable, *args: Any) -> int:
    """Floating point operations of all matrix products in `fn(*args)`, two a multiply-add; arguments may be abstract.

    A scan counts its body as often as it runs, a conditional its longest branch. Raises ValueError for a loop whose
    number of rounds is not known beforehand.

        >>> a = jax.ShapeDtypeStruct((3, 4), "float32")
        >>> count(lambda a: a @ a.T, a)
        72
    """
    # products whose result nobody reads, such as the gradients of frozen weights, are not run either
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return _count(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0])


def _count(jaxpr: Any) -> int:
    total = 0
    for equation in jaxpr.eqns:
        inner = [_count(each) for each in _inner(equation.params)]
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * prod(equation.outvars[0].aval.shape) * prod(shape[axis] for axis in contracted)
        elif equation.primitive.name == "scan":
            total += equation.params["length"] * sum(inner)
        elif equation.primitive.name == "cond":
            total += max(inner)
        elif equation.primitive.name == "while" and sum(inner):
            raise ValueError("matrix products in a loop of unknown length cannot be counted")
        else:
            total += sum(inner)
    return total


def _inner(params: dict[str, Any]) -> Iterator[Any]:
    """The programs within an equation: the bodies of jit, scan, cond, checkpoint and the like."""
    for value in params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            each = getattr(each, "jaxpr", each)
            if hasattr(each, "eqns"):
                yield each


def abstract_batch(
    model: Model, rows: int, length: int, span: int, targets: int | None = None, cached: bool = False
) -> Batch:
    """A Batch of shapes alone: `rows` of `length` tokens, `span` system slots, `targets` target slots (None: no slots)."""

    def of(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    whole, flags = of(rows, length), of(rows, length, dtype=jnp.bool_)
    slots = None if targets is None else of(rows, targets)
    prefix = of(rows, length, model.spec.embed_dim, dtype=jnp.float32) if cached else None
    return Batch(whole, whole, whole, flags, flags, of(rows, span), slots, prefix)


def _abstract_params(model: Model) -> tuple[Tree, Tree]:
    return decoder.abstract_params(model.spec, jnp.float32), jax.eval_shape(model.init_adapters, jax.random.key(0))


def _countable(model: Model) -> Model:
    """The model with products alone: what a kernel computes shows in no program."""
    return replace(model, attention="xla")


def forward_flops(model: Model, rows: int, length: int, span: int) -> int:
    """Of one forward pass of the adapted model, logits at every position; nothing is allocated."""
    model = _countable(model)
    backbone, adapters = _abstract_params(model)
    return count(model.logits, {"backbone": backbone, "adapters": adapters}, abstract_batch(model, rows, length, span))


def step_flops(model: Model, rows: int, length: int, span: int, targets: int | None = None, cached: bool = False) -> int:
    """Of one training step: forward, loss and backward; the optimiser has no matrix product.

    targets  positions a row that go through the head; None: all
    cached   the hidden states at the first boundary are given
    """
    model = _countable(model)
    backbone, adapters = _abstract_params(model)
    optimizer = optax.identity()
    state = jax.eval_shape(lambda tree: init_state(optimizer, tree), adapters)
    return count(
        make_train_step(model, optimizer), state, backbone, abstract_batch(model, rows, length, span, targets, cached)
    )
