import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calyrex_jax.adapters.cal import Cal
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.types import slots
from calyrex_jax.model import Model
from calyrex_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from calyrex_jax.training.step import init_state, make_train_step
from tests import tiny

SPEC = tiny.spec(num_hidden_layers=5)
CONFIG = OptimizerConfig(learning_rate=1e-2, steps=10, schedule="constant")


@functools.cache
def model(placement="3,5"):
    return tiny.model(SPEC, placement)


@functools.cache
def parts():
    """A backbone and a non-zero adapter state."""
    both = tiny.params(model())
    return both["backbone"], both["adapters"]


def batch(counts=(9, 2, 5, 1), seed=0):
    """Four conversations with so many targets each, at their ends; spans at the start, middle, none, several."""
    made = tiny.packed([[talk] for talk in tiny.conversations((14, 13, 12, 15), seed)], 16)
    targets = np.zeros_like(made.system)
    for row, count in enumerate(counts):
        end = made.segments[row].sum()
        targets[row, end - count : end] = True
    return made.replace(targets=targets, target_slots=slots(targets, 12))


def stepped(optimizer, made, state=None, backbone=None, count=1, **options):
    """The state and metrics after `count` steps on the same batch."""
    state = init_state(optimizer, parts()[1]) if state is None else state
    backbone = parts()[0] if backbone is None else backbone
    step = jax.jit(make_train_step(model(), optimizer, **options))
    for _ in range(count):
        state, metrics = step(state, backbone, made)
    return state, metrics


def test_steps_learn_the_batch_and_leave_the_backbone_alone():
    optimizer = make_optimizer(CONFIG, parts()[1])
    before = trees.checksum(parts()[0])
    _, first = stepped(optimizer, batch())
    state, last = stepped(optimizer, batch(), count=30)
    assert float(last["loss"]) < 0.5 * float(first["loss"])
    assert (int(first["targets"]), int(first["tokens"]), int(state.step), int(state.skipped)) == (17, 54, 30, 0)
    assert trees.checksum(parts()[0]) == before


def test_only_adapters_get_gradients_and_optimiser_state():
    adapters = parts()[1]
    state = init_state(make_optimizer(CONFIG, adapters), adapters)
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim)
    assert moments == 2 * trees.count(adapters)
    moved, _ = stepped(make_optimizer(CONFIG, adapters), batch())
    for path, leaf in trees.flatten(moved.trainable).items():
        assert (leaf != trees.flatten(adapters)[path]).any(), path


def test_accumulated_microbatches_equal_one_batch_though_their_targets_differ():
    """9 + 5 targets in one microbatch, 2 + 1 in the other: a mean of their means would be another gradient."""
    optimizer = optax.sgd(0.1)
    whole, one = stepped(optimizer, batch())
    for pieces in (2, 4):
        split, other = stepped(optimizer, batch(), accumulate=pieces)
        chex.assert_trees_all_close(split.trainable, whole.trainable, atol=1e-6)
        chex.assert_trees_all_close(other, one, rtol=1e-5)
    alone = [stepped(optimizer, jax.tree.map(lambda a, r=r: a[r::2], batch()))[0].trainable for r in (0, 1)]
    mean_of_means = jax.tree.map(lambda a, b: (a + b) / 2, *alone)
    furthest = max(np.abs(a - b).max() for a, b in zip(jax.tree.leaves(mean_of_means), jax.tree.leaves(whole.trainable)))
    assert furthest > 1e-4


def test_chunks_padding_and_slots_do_not_change_a_step():
    optimizer = optax.sgd(0.1)
    whole, _ = stepped(optimizer, batch())
    for made, chunk in ((batch(), 3), (batch().replace(target_slots=None), 128)):
        chex.assert_trees_all_close(stepped(optimizer, made, chunk=chunk)[0].trainable, whole.trainable, atol=1e-6)


def test_compact_targets_do_not_change_a_step():
    optimizer = optax.sgd(0.1)
    whole, one = stepped(optimizer, batch())
    for chunk in (2, 128):
        moved, other = stepped(optimizer, batch(), chunk=chunk, compact=True)
        chex.assert_trees_all_close(moved.trainable, whole.trainable, atol=1e-6)
        np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)


@pytest.mark.parametrize("compact", [False, True])
def test_distillation_keeps_the_frozen_model(compact):
    """At initialisation nothing differs, so nothing is learned; a state that was moved comes back."""
    everything = batch().replace(distill=np.ones((4, 16), bool))
    fresh = model().init_adapters(jax.random.key(0))
    optimizer = optax.sgd(0.1)
    state, metrics = stepped(optimizer, everything, init_state(optimizer, fresh), compact=compact)
    chex.assert_trees_all_close(state.trainable, fresh, atol=1e-8)  # the two programs may add in another order
    assert abs(float(metrics["loss"])) < 1e-6 and float(metrics["grad_norm"]) < 1e-6
    adam = make_optimizer(CONFIG, parts()[1])
    _, before = stepped(adam, everything, compact=compact)
    _, after = stepped(adam, everything, compact=compact, count=30)
    assert 0 < float(after["loss"]) < 0.5 * float(before["loss"])


def test_only_the_marked_conversations_are_distilled():
    some = np.zeros((4, 16), bool)
    some[0] = True  # row 2 has no span, so nothing could be learned there
    optimizer = optax.sgd(0.1)
    alone = batch((0, 2, 5, 1))
    together, metrics = stepped(optimizer, batch().replace(distill=some))
    assert int(metrics["targets"]) == 17
    hard, _ = stepped(optimizer, alone)
    none, _ = stepped(optimizer, batch().replace(distill=some & False))
    plain, _ = stepped(optimizer, batch())
    chex.assert_trees_all_close(none.trainable, plain.trainable, atol=1e-6)
    for other in (hard, plain):
        furthest = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (together.trainable, other.trainable))))
        assert furthest > 1e-4


def test_a_cached_prefix_gives_the_same_step():
    optimizer = optax.sgd(0.1)
    whole, one = stepped(optimizer, batch())
    prefix = jax.jit(model().prefix)(parts()[0], batch())
    cached, other = stepped(optimizer, batch().replace(prefix=np.asarray(prefix)))
    chex.assert_trees_all_close(cached.trainable, whole.trainable, atol=1e-6)
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_changes_nothing_but_its_count(accumulate):
    optimizer = make_optimizer(CONFIG, parts()[1])
    good = np.asarray(jax.jit(model().prefix)(parts()[0], batch()))
    bad = good.copy()
    bad[0, 3] = np.nan
    step = jax.jit(make_train_step(model(), optimizer, accumulate=accumulate))
    state = init_state(optimizer, parts()[1])
    state, _ = step(state, parts()[0], batch().replace(prefix=good))
    kept = trees.checksum({"trainable": state.trainable, "opt_state": state.opt_state})
    for count in (1, 2, 3, 4):
        state, metrics = step(state, parts()[0], batch().replace(prefix=bad))
        assert trees.checksum({"trainable": state.trainable, "opt_state": state.opt_state}) == kept
        assert (int(state.step), int(metrics["skipped"])) == (1 + count, count) and not np.isfinite(metrics["loss"])
    state, metrics = step(state, parts()[0], batch().replace(prefix=good))
    assert int(metrics["skipped"]) == 0 and np.isfinite(metrics["loss"])
    assert trees.checksum({"trainable": state.trainable, "opt_state": state.opt_state}) != kept


def scans(jaxpr):
    """(length, reversed, shapes that it stacks) of every scan, those within scans too."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan":
            stacked = equation.outvars[equation.params["num_carry"] :]
            yield equation.params["length"], equation.params["reverse"], [out.aval.shape for out in stacked]
        for inner in jax.core.jaxprs_in_params(equation.params):
            yield from scans(inner)


def test_backpropagation_never_enters_the_layers_below_the_first_boundary():
    """Three layers below it and two above, told apart by the lengths of their scans."""
    optimizer = optax.sgd(0.1)
    step = make_train_step(model(), optimizer)
    traced = jax.make_jaxpr(step)(init_state(optimizer, parts()[1]), parts()[0], batch())
    found = list(scans(traced.jaxpr))
    below = [scan for scan in found if scan[0] == 3]
    assert below == [(3, False, [])]  # run once, forwards, and nothing of it kept
    above = [scan for scan in found if scan[0] == 2]
    assert sorted(reverse for _, reverse, _ in above) == [False, True]


def test_one_compilation_for_each_shape():
    optimizer = make_optimizer(CONFIG, parts()[1])
    step = jax.jit(make_train_step(model(), optimizer))
    state = init_state(optimizer, parts()[1])
    for seed in range(3):
        state, _ = step(state, parts()[0], batch(seed=seed))
    assert step._cache_size() == 1


def test_frozen_adapters_stay_bit_identical_and_have_no_state():
    one, two = (Cal(tiny.cal_config(SPEC), (4,), name) for name in ("one", "two"))
    leaves = {"one": tiny.perturbed(one.init(jax.random.key(0)), 1), "two": tiny.perturbed(two.init(jax.random.key(1)), 2)}
    config = OptimizerConfig(learning_rate=1e-2, steps=10, weight_decay=0.1, freeze=("two",))
    optimizer = make_optimizer(config, leaves)
    state = init_state(optimizer, leaves)
    assert sum(leaf.size for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim) == 2 * trees.count(leaves["one"])
    step = jax.jit(make_train_step(Model(SPEC, (one, two)), optimizer))
    for _ in range(3):
        state, _ = step(state, parts()[0], batch())
    assert trees.checksum(state.trainable["two"]) == trees.checksum(leaves["two"])
    assert trees.checksum(state.trainable["one"]) != trees.checksum(leaves["one"])


def test_frozen_gradients_do_not_take_part_in_clipping():
    leaves = {"one": {"w": jnp.ones((2, 2))}, "two": {"w": jnp.ones((2, 2))}}
    config = OptimizerConfig(learning_rate=1.0, steps=1, schedule="constant", clip_norm=1.0, freeze=("two",), beta1=0.0)
    grads = {"one": {"w": jnp.full((2, 2), 0.1)}, "two": {"w": jnp.full((2, 2), 1e6)}}
    optimizer = make_optimizer(config, leaves)
    updates, _ = optimizer.update(grads, optimizer.init(leaves), leaves)
    np.testing.assert_allclose(updates["one"]["w"], -1.0, rtol=1e-5)  # Adam's first step; clipped by 1e6 its eps would show
    chex.assert_trees_all_equal(updates["two"]["w"], jnp.zeros((2, 2)))


def test_weight_decay_acts_on_matrices_alone():
    _, adapters = parts()
    config = OptimizerConfig(learning_rate=0.5, steps=1, schedule="constant", weight_decay=0.2, clip_norm=0.0)
    optimizer = make_optimizer(config, adapters)
    still = jax.tree.map(jnp.zeros_like, adapters)
    updates, _ = optimizer.update(still, optimizer.init(adapters), adapters)
    for path, update in trees.flatten(updates).items():
        leaf = trees.flatten(adapters)[path]
        expected = -0.1 * leaf if leaf.ndim >= 2 else jnp.zeros_like(leaf)
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=path)
    assert {leaf.ndim for leaf in jax.tree.leaves(adapters)} == {1, 2, 3}


def test_clipping_bounds_the_global_norm():
    leaves = {"one": {"w": jnp.zeros((2, 2))}}
    grads = {"one": {"w": jnp.full((2, 2), 50.0)}}
    config = OptimizerConfig(learning_rate=1.0, steps=1, schedule="constant", clip_norm=1.0)
    optimizer = make_optimizer(config, leaves)
    _, state = optimizer.update(grads, optimizer.init(leaves), leaves)
    first_moments = next(leaf for leaf in jax.tree.leaves(state) if leaf.ndim)
    np.testing.assert_allclose(first_moments, 0.1 * 0.5, rtol=1e-5)  # (1 - beta1) times 50 scaled to a norm of 1


def test_schedules():
    cosine = learning_rate(OptimizerConfig(learning_rate=2.0, steps=14, warmup_steps=4, final_fraction=0.1))
    np.testing.assert_allclose([float(cosine(step)) for step in range(4)], [0.5, 1.0, 1.5, 2.0])
    np.testing.assert_allclose([float(cosine(step)) for step in (4, 9, 14, 20)], [2.0, 1.1, 0.2, 0.2], rtol=1e-6)
    constant = learning_rate(OptimizerConfig(learning_rate=2.0, steps=9, warmup_steps=2, schedule="constant"))
    np.testing.assert_allclose([float(constant(step)) for step in (0, 1, 2, 8)], [1.0, 2.0, 2.0, 2.0])
    cut = learning_rate(OptimizerConfig(learning_rate=2.0, steps=2, warmup_steps=4))  # a run that ends within its warm-up
    np.testing.assert_allclose([float(cut(step)) for step in (0, 1)], [0.5, 1.0])
    plain = learning_rate(OptimizerConfig(learning_rate=2.0, steps=10))
    np.testing.assert_allclose([float(plain(step)) for step in (0, 5, 10)], [2.0, 1.1, 0.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("steps", 0),
        ("schedule", "linear"),
        ("warmup_steps", -1),
        ("final_fraction", 1.5),
        ("weight_decay", -0.1),
        ("clip_norm", -1.0),
        ("beta1", 1.0),
        ("beta2", 1.0),
    ],
)
def test_bad_values_name_their_field(field, value):
    with pytest.raises(UserError, match=rf"train\.{field}: got .*, expected"):
        OptimizerConfig(**{"learning_rate": 1e-3, "steps": 10, field: value})


def test_unknown_and_complete_freezing_are_refused():
    leaves = {"one": {"w": jnp.ones((2, 2))}, "two": {"w": jnp.ones((2, 2))}}
    for freeze, message in ((("three",), "'three' is not an adapter"), (("one", "two"), "every adapter is frozen")):
        with pytest.raises(UserError, match=message):
            make_optimizer(OptimizerConfig(learning_rate=1e-3, steps=1, freeze=freeze), leaves)
