import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from calyrex_jax.adapters.svgt import Svgt
from calyrex_jax.adapters.value_bridge import BridgeConfig
from calyrex_jax.adapters.value_space import ValueSpaceConfig
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.training import svgt as parts
from calyrex_jax.training.step import init_state
from calyrex_jax.training.svgt import BridgeLoss, Examples, StageConfig
from calyrex_jax.training.svgt_metrics import binary_metrics
from tests import tiny

D, Z = 8, 8
NOTHING = np.zeros((0,), np.float32)


def made(**changes):
    value = ValueSpaceConfig(**{"embed_dim": D, "value_dim": Z, "num_heads": 2, "dropout": 0.0} | changes)
    return Svgt(value, BridgeConfig(D, Z, num_tokens=3, num_heads=2), layer=1, refresh_every=2, momentum=0.5)


@functools.cache
def trainable(svgt, size=0.4):
    return {"svgt": tiny.noise(jax.eval_shape(svgt.init, jax.random.key(0)), 1, size)}


def examples(rows=16, seed=0, prompts=True):
    """The response's class shows in one feature, the prompt's in another; a harmful pair is one of unlike classes."""
    rng = np.random.default_rng(seed)
    response, prompt = (rng.normal(size=(rows, n, D)).astype(np.float32) for n in (6, 5))
    said, asked = (rng.random(rows) < 0.5 for _ in range(2))
    response[..., 0] = np.where(said, 2, -2)[:, None]
    prompt[..., 1] = np.where(asked, 2, -2)[:, None]
    mask = np.arange(6) < rng.integers(2, 7, size=(rows, 1))
    alone = Examples(response, mask, said.astype(np.float32))
    paired = Examples(response, mask, (said != asked).astype(np.float32), prompt, np.ones((rows, 5), bool))
    return paired if prompts else alone


@functools.cache
def stepper(svgt, stage, rate=3e-3, **options):
    """An optimiser and a jitted step, so that tests share compilations."""
    optimizer = parts.make_optimizer(StageConfig(stage, rate, rate / 10), trainable(svgt))
    return optimizer, jax.jit(parts.make_judge_step(svgt, optimizer, stage, **options))


def run(svgt, stage, tree, batches, **options):
    """The state and the metrics of every step."""
    optimizer, step = stepper(svgt, stage, **options)
    state, seen = init_state(optimizer, tree), []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(metrics)
    return state, seen


def measured(svgt, tree, held_out):
    return binary_metrics(np.asarray(jax.jit(parts.make_judge(svgt))(tree, held_out)), held_out.labels)


def test_labels_of_each_stage():
    tree = trainable(made(pooling="attention"))
    for stage, expected in {
        1: {"encoder_0": "new", "pool": "new", "discriminator": "new", "conditional": "frozen", "bridge": "frozen"},
        2: {"encoder_0": "old", "pool": "old", "discriminator": "old", "conditional": "new", "bridge": "frozen"},
        3: {"encoder_0": "frozen", "pool": "frozen", "discriminator": "frozen", "conditional": "frozen", "bridge": "new"},
    }.items():
        for path, label in trees.flatten(parts.labels(stage, tree)).items():
            name = path.split("/")[1 if "/bridge/" in path else 2]
            assert label == expected.get(name, expected["encoder_0"]), path


def test_a_leaf_that_no_stage_knows_is_an_error():
    tree = trainable(made())
    for strange in ({"svgt": tree["svgt"] | {"extra": NOTHING}}, tree | {"cal": {"boundary_1": NOTHING}}):
        with pytest.raises(ValueError, match="belongs to no stage"):
            parts.make_optimizer(StageConfig(2, 1e-3), strange)


@pytest.mark.slow
def test_the_conditional_path_learns_what_the_response_alone_does_not_tell():
    """Stage 1 on responses, stage 2 on pairs whose label is the exclusive or of both classes."""
    svgt = made()
    tree = {"svgt": svgt.init(jax.random.key(0))}
    before = {path: trees.checksum(leaf) for path, leaf in trees.flatten(tree).items()}
    first, seen = run(svgt, 1, tree, [examples(32, seed, prompts=False) for seed in range(60)])
    assert float(seen[-1]["loss"]) < 0.2 < float(seen[0]["loss"]) and float(seen[-1]["accuracy"]) > 0.9
    assert measured(svgt, first.trainable, examples(64, 1000, prompts=False))["auroc"] > 0.99
    second, _ = run(svgt, 2, first.trainable, [examples(32, seed) for seed in range(200)], rate=1e-2)
    held_out = examples(64, 1000)
    blind = held_out.replace(prompt=None, prompt_mask=None)
    assert measured(svgt, first.trainable, blind)["auroc"] < 0.75
    assert measured(svgt, second.trainable, held_out)["auroc"] > 0.95

    middle, after = (trees.flatten(state.trainable) for state in (first, second))
    for path, checksum in before.items():
        assert (trees.checksum(middle[path]) == checksum) == ("conditional" in path or "/bridge/" in path), path
        assert (trees.checksum(after[path]) == trees.checksum(middle[path])) == ("/bridge/" in path), path


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_frozen_leaves_have_no_state_get_exact_zeros_and_do_not_count_in_clipping(stage):
    tree = trainable(made())
    optimizer = parts.make_optimizer(StageConfig(stage, 1e-2, 1e-3, clip_norm=1.0, weight_decay=0.0), tree)
    kinds = trees.flatten(parts.labels(stage, tree))
    state = optimizer.init(tree)
    trained = sum(trees.count(leaf) for path, leaf in trees.flatten(tree).items() if kinds[path] != "frozen")
    assert trees.count([leaf for leaf in jax.tree.leaves(state) if leaf.ndim or leaf.dtype == jnp.float32]) == 2 * trained
    # alone, the gradients of what is trained are within the limit; with the frozen ones they are far beyond it
    grads = trees.map_with_path(lambda path, g: jnp.full_like(g, 1e3 if kinds[path] == "frozen" else 1e-3), tree)
    _, state = optimizer.update(grads, state, tree)
    updates, _ = optimizer.update(grads, state, tree)
    rates = {"new": 1e-2, "old": 1e-3, "frozen": 0.0}
    for path, update in trees.flatten(updates).items():
        assert update == pytest.approx(-rates[kinds[path]], rel=1e-4), path
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and leaf.size]
    assert max(float(abs(leaf).max()) for leaf in moments) <= 1e-3, "the frozen gradients entered"


def test_clipping_is_over_everything_that_is_trained():
    tree = trainable(made())
    optimizer = parts.make_optimizer(StageConfig(2, 1.0, 1.0, clip_norm=1.0, weight_decay=0.0), tree)
    grads = jax.tree.map(jnp.ones_like, tree)
    _, state = optimizer.update(grads, optimizer.init(tree), tree)
    count = trees.count(tree["svgt"]["value_space"])
    first_moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim and float(leaf.reshape(-1)[0]) > 1e-4]
    assert first_moments and all(leaf == pytest.approx(0.1 / np.sqrt(count), rel=1e-4) for leaf in first_moments)


def test_only_matrices_decay_and_warm_up_is_linear():
    tree = trainable(made(pooling="attention"))
    zeros = jax.tree.map(jnp.zeros_like, tree)
    optimizer = parts.make_optimizer(StageConfig(1, 0.5, weight_decay=0.1, warmup_steps=2), tree)
    state, kinds, leaves = optimizer.init(tree), trees.flatten(parts.labels(1, tree)), trees.flatten(tree)
    for rate in (0.25, 0.5, 0.5):
        updates, state = optimizer.update(zeros, state, tree)
        for path, update in trees.flatten(updates).items():
            decays = kinds[path] == "new" and path.endswith(("kernel", "pool"))
            np.testing.assert_allclose(update, -0.1 * rate * leaves[path] if decays else 0 * update, rtol=1e-5)


def test_a_step_that_is_not_finite_changes_nothing_but_its_counts():
    svgt = made()
    tree, batch = trainable(svgt), examples(8)
    broken = batch.replace(response=np.where(batch.response_mask[..., None], np.nan, batch.response))
    optimizer, step = stepper(svgt, 2)
    start, _ = step(init_state(optimizer, tree), batch)
    state, metrics = step(start, broken)
    assert int(state.step) == 2 and int(state.skipped) == int(metrics["skipped"]) == 1
    assert trees.checksum(state.trainable) == trees.checksum(start.trainable)
    assert trees.checksum(state.opt_state) == trees.checksum(start.opt_state)
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 0 and trees.checksum(state.trainable) != trees.checksum(start.trainable)


def test_the_loss_is_that_of_each_example_and_empty_rows_count_nowhere():
    svgt = made()
    tree, batch = trainable(svgt), examples(4)
    scores, mask = jax.jit(parts.prefix_scores, static_argnums=0)(svgt, tree, batch)
    rows = {True: [], False: []}
    for i in range(4):
        own = np.asarray(scores, np.float64)[i, batch.response_mask[i]]
        surprise = np.log1p(np.exp(-own)) if batch.labels[i] else np.log1p(np.exp(own))
        rows[True].append(surprise.mean())
        rows[False].append(surprise[-1])
    for dense, each in rows.items():
        total, count = parts.judge_loss(scores, mask, batch.labels, dense)
        assert float(count) == 4
        np.testing.assert_allclose(total, np.sum(each), rtol=1e-5)

    filled = jax.tree.map(lambda a: np.concatenate([a, np.zeros_like(a)]), batch)
    filled = filled.replace(response=np.where(filled.response_mask[..., None], filled.response, np.nan))
    _, [metrics] = run(svgt, 2, tree, [filled])
    assert float(metrics["loss"]) == pytest.approx(np.mean(rows[True]), rel=1e-5) and float(metrics["examples"]) == 4
    right = [(scores[i, np.flatnonzero(m)[-1]] > 0) == (batch.labels[i] > 0) for i, m in enumerate(batch.response_mask)]
    assert float(metrics["accuracy"]) == pytest.approx(np.mean(right))


def test_without_causality_the_whole_is_judged():
    svgt = made(causal=False)
    tree, batch = trainable(svgt), examples(4)
    scores, mask = parts.prefix_scores(svgt, tree, batch)
    assert scores.shape == mask.shape == (4, 1)
    np.testing.assert_array_equal(parts.make_judge(svgt)(tree, batch), scores[:, 0])
    _, [metrics] = run(svgt, 2, tree, [batch])
    expected = optax.sigmoid_binary_cross_entropy(scores[:, 0], batch.labels).mean()
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
def test_dropout_differs_from_step_to_step_and_follows_the_seed():
    svgt = made(dropout=0.5)
    tree, batch = trainable(svgt), examples(8)
    optimizer, step = stepper(svgt, 2)
    start = init_state(optimizer, tree)
    losses = [float(step(start.replace(step=jnp.asarray(number)), batch)[1]["loss"]) for number in (0, 0, 1)]
    other = float(stepper(svgt, 2, seed=1)[1](start, batch)[1]["loss"])
    assert losses[0] == losses[1] and len({*losses, other}) == 3


def test_losses_of_stage_3():
    bridge, h_v = np.zeros((3, 2, 4), np.float32), np.zeros((3, 4), np.float32)
    bridge[0, :, 0], h_v[0, 1] = (3.0, 1.0), 2.0  # ratios 1.5 and 0.5: 0.3 beyond the tolerance, both
    bridge[1, :, 0], h_v[1, 1] = (1.1, 0.9), 1.0  # within it
    scores = np.array([[1.0, -1.0, 9.0], [0.5, 2.0, -3.0], [7.0, 7.0, 7.0]], np.float32)
    mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)
    pressure = np.log1p(np.exp(scores)) + 2 * np.maximum(scores, 0)
    for name, safety in (
        ("dense", (pressure[0, :2].mean() + pressure[1, 1:].mean()) / 2),
        ("last", (pressure[0, 1] + pressure[1, 2]) / 2),
    ):
        loss, found = BridgeLoss(0.5, 2.0, 0.1, safe_loss=name)(bridge, h_v, scores, mask, 12.0, 4.0)
        np.testing.assert_allclose(found["safety"], safety, rtol=1e-5)
        np.testing.assert_allclose([found["ce"], found["regulariser"], found["norm_ratio"]], [3.0, 0.15, 1.0], rtol=1e-5)
        np.testing.assert_allclose(loss, 0.5 * 3 + 2 * safety + 0.1 * 0.15, rtol=1e-5)
    slopes = jax.grad(lambda b, s: BridgeLoss()(b, h_v, s, mask, 12.0, 4.0)[0], argnums=(0, 1))(bridge, scores)
    assert all(np.isfinite(g).all() for g in slopes)
    assert (np.asarray(slopes[1])[~mask] == 0).all() and (np.asarray(slopes[0])[1:] == 0).all()


def test_metrics_equal_scikit_learns():
    sklearn = pytest.importorskip("sklearn.metrics", reason="the reference is scikit-learn")
    rng = np.random.default_rng(0)
    for decimals in (8, 0):  # rounded scores have many ties
        labels = rng.random(300) < 0.4
        scores = np.round(rng.normal(size=300) * 2 + labels, decimals)
        found = binary_metrics(scores, labels)
        assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(labels, scores > 0))
        assert found["f1"] == pytest.approx(sklearn.f1_score(labels, scores > 0))
        assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(labels, scores))


def test_calibration_error():
    # 0.88 three times with two right, 0.12 once with none harmful
    found = binary_metrics(np.array([2.0, 2.0, 2.0, -2.0]), np.array([1, 1, 0, 0]))
    high = 1 / (1 + np.exp(-2))
    assert found["ece"] == pytest.approx(0.75 * abs(high - 2 / 3) + 0.25 * (1 - high))
    sure = binary_metrics(np.array([1e4, -1e4]), np.array([1, 0]))
    assert sure == {"accuracy": 1.0, "f1": 1.0, "auroc": 1.0, "ece": pytest.approx(0.0, abs=1e-9)}
    assert binary_metrics(np.zeros(4), np.array([1, 0, 1, 0]))["auroc"] == 0.5


@pytest.mark.parametrize("labels", [[1, 1, 1], [0, 0, 0], []])
def test_labels_of_one_class_are_refused(labels):
    said = "no example" if not labels else f"3 examples, all {'harmful' if labels[0] else 'safe'}"
    with pytest.raises(UserError, match=f"stage 1: {said}; both classes are needed"):
        binary_metrics(np.zeros(len(labels)), np.array(labels), "stage 1")


def test_scores_that_are_not_finite_are_an_error():
    with pytest.raises(ValueError, match="1 of 2 scores are not finite"):
        binary_metrics(np.array([np.nan, 1.0]), np.array([0, 1]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StageConfig(4, 1e-3), r"config\.svgt\.stages: stage 4 is not known"),
        (lambda: StageConfig(1, 0.0), r"config\.svgt\.stage1\.learning_rate: got 0\.0, expected above 0"),
        (lambda: StageConfig(2, 1e-3, 0.0), r"config\.svgt\.stage2\.old_learning_rate: got 0\.0"),
        (lambda: StageConfig(3, 1e-3, clip_norm=-1.0), r"config\.svgt\.stage3\.clip_norm: got -1\.0"),
        (lambda: BridgeLoss(safe_loss="first"), r"config\.svgt\.safe_loss: 'first' is not known"),
        (lambda: BridgeLoss(reg=-1.0), r"config\.svgt\.lambda_reg: got -1\.0"),
    ],
)
def test_what_cannot_be(make, said):
    with pytest.raises(UserError, match=said):
        make()
