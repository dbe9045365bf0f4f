import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.api import Site
from calyrex_jax.adapters.cal import Cal, CalConfig, default_mlp_dim
from calyrex_jax.core import trees
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.numerics import attend
from tests import tiny

SPEC = tiny.spec()


def mixed_batch(length=20, width=8):
    """Spans at the start, in the middle, none, several pieces; two rows of packed segments; padding after them."""
    start, middle, none, several = tiny.conversations((9, 14, 5, 12))
    rows = [[start], [middle], [none], [several], [none, start, none], [middle, none]]
    return tiny.packed(rows, length, width)


def jitted(model):
    return jax.jit(model.logits)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("placement", "changes"),
    [("late8th", {}), ("every", {}), ("early8th", {}), ("4", {}), ("late8th", {"copy": True})]
    + [("late8th", {"qk_norm": True, "mlp_dim": 0})],
)
def test_at_initialisation_logits_equal_the_backbones_bit_for_bit(placement, changes, dtype):
    plain, adapted = tiny.model(SPEC), tiny.model(SPEC, placement, **changes)
    backbone = tiny.backbone(SPEC, dtype=dtype)
    adapters = adapted.init_adapters(jax.random.key(3))
    for batch in (mixed_batch(), tiny.packed([tiny.without_system(tiny.conversations())], 40, width=0)):
        expected = jitted(plain)({"backbone": backbone, "adapters": {}}, batch)
        found = jitted(adapted)({"backbone": backbone, "adapters": adapters}, batch)
        assert np.asarray(expected).tobytes() == np.asarray(found).tobytes()


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("width", [0, 8])
def test_without_a_system_prompt_a_trained_block_changes_nothing(width, copy):
    adapted = tiny.model(SPEC, "late8th", copy=copy)
    params = tiny.params(adapted)
    batch = tiny.packed([[c] for c in tiny.without_system(tiny.conversations())], 16, width)
    expected = jitted(tiny.model(SPEC))(params, batch)
    assert np.asarray(expected).tobytes() == np.asarray(jitted(adapted)(params, batch)).tobytes()
    ungated = jitted(tiny.model(SPEC, "late8th", gate_mlp_by_span=False))(params, batch)
    assert np.abs(np.asarray(ungated - expected)).max() > 1e-2


@pytest.mark.parametrize(
    ("changes", "count"),
    [({}, 9), ({"copy": True}, 11), ({"qk_norm": True, "copy": True}, 13), ({"qk_norm": True, "mlp_dim": 0}, 7)],
)
@pytest.mark.parametrize("keys", ["span", "all"])
def test_every_leaf_of_a_non_zero_state_matters(keys, changes, count):
    model = tiny.model(SPEC, "1,3", keys=keys, rope_theta=100.0, **changes)
    params, batch = tiny.params(model), mixed_batch()
    run = jitted(model)
    before = run(params, batch)
    leaves = trees.flatten(params["adapters"])
    assert len(leaves) == 2 * count
    for path, leaf in leaves.items():
        moved = leaves | {path: leaf + (0.5 if "copy" in path else 0.05) * jax.random.normal(jax.random.key(7), leaf.shape)}
        change = np.abs(run({**params, "adapters": trees.unflatten(moved)}, batch) - before).max()
        assert np.isfinite(change) and change > 1e-4, path


def norm(x, scale):
    return x / np.sqrt((x * x).mean() + 1e-5) * scale


def turned(x, position, theta):
    """Rotary phases on heads [N, H], written with complex numbers."""
    half = x.shape[-1] // 2
    phase = np.exp(1j * position * theta ** (-np.arange(half) / half))
    pairs = (x[:, :half] + 1j * x[:, half:]) * phase
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def plain_block(leaves, config, x, outputs, positions, segments, system):
    """The block's equations for one row, token by token: x, outputs [T, D] float64 and the row's masks -> [T, D]."""
    p = {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}
    out = np.zeros_like(x)
    for t in range(len(x)):
        seen = [s for s in range(t + 1) if segments[s] == segments[t] and segments[t] > 0]
        in_span = [s for s in seen if system[s]]
        keys = in_span if config.keys == "span" else seen
        q = np.einsum("d,dnh->nh", norm(x[t], p["attn_norm"]), p["w_q"])
        if config.qk_norm:
            q = np.array([norm(one, p["q_norm"]) for one in q])
        if config.rope_theta is not None:
            q = turned(q, positions[t], config.rope_theta)
        attended, pointed = np.zeros_like(q), np.zeros_like(x[t])
        for head in range(config.num_heads if keys else 0):
            group = head // (config.num_heads // config.num_kv_heads)
            k = [np.einsum("d,dkh->kh", norm(x[s], p["attn_norm"]), p["w_k"]) for s in keys]
            if config.qk_norm:
                k = [np.array([norm(one, p["k_norm"]) for one in heads]) for heads in k]
            if config.rope_theta is not None:
                k = [turned(one, positions[s], config.rope_theta) for one, s in zip(k, keys)]
            v = [np.einsum("d,dkh->kh", norm(x[s], p["attn_norm"]), p["w_v"])[group] for s in keys]
            scores = np.array([q[head] @ one[group] for one in k]) / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            attended[head] = (weights / weights.sum()) @ np.array(v)
            if config.copy:
                gate = norm(x[t], p["attn_norm"]) @ p["w_copy"][:, head] / config.embed_dim
                pointed += gate * weights / weights.sum() @ np.array([norm(outputs[s], p["copy_scale"]) for s in keys])
        size = np.sqrt((x[t] * x[t]).mean() + 1e-5)
        middle = x[t] + np.einsum("nh,nhd->d", attended, p["w_o"]) + size * pointed
        after = middle
        if config.mlp_dim:
            normed = norm(middle, p["mlp_norm"])
            gate = normed @ p["w_gate"]
            after = middle + (gate / (1 + np.exp(-gate)) * (normed @ p["w_up"])) @ p["w_down"]
        out[t] = x[t] if config.gate_mlp_by_span and not in_span else after
    return out


@pytest.mark.parametrize(
    "changes",
    [{}, {"keys": "all"}, {"gate_mlp_by_span": False}, {"rope_theta": 100.0}, {"keys": "all", "gate_mlp_by_span": False}]
    + [{"copy": True}, {"copy": True, "keys": "all"}, {"qk_norm": True, "rope_theta": 100.0}, {"mlp_dim": 0}],
)
def test_a_block_equals_its_equations_written_as_a_plain_loop(changes):
    """The mask rule for spans at the start, in the middle, none, several, and for packed segments."""
    config = tiny.cal_config(SPEC, **changes)
    cal = Cal(config, (2,))
    leaves = tiny.perturbed(cal.init(jax.random.key(0))["boundary_2"])
    batch = mixed_batch()
    x = np.random.default_rng(0).normal(size=(*batch.tokens.shape, SPEC.embed_dim)).astype(np.float32)
    outputs = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    found = np.asarray(jax.jit(cal.apply)(leaves, Site(x, outputs, batch.positions, batch.segments, batch.span, 2)))
    for row in range(len(x)):
        masks = batch.positions[row], batch.segments[row], batch.system[row]
        expected = plain_block(leaves, config, x[row].astype(np.float64), outputs[row].astype(np.float64), *masks)
        real = batch.segments[row] > 0
        np.testing.assert_allclose(found[row][real], expected[real], rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"keys": "all"}, {"gate_mlp_by_span": False}, {"copy": True}])
@pytest.mark.parametrize("width", [0, 8])
def test_values_and_gradients_are_finite_where_rows_see_nothing(width, changes, dtype):
    cal = Cal(tiny.cal_config(SPEC, **changes), (2,))
    leaves = tiny.perturbed(cal.init(jax.random.key(0))["boundary_2"])
    batch = mixed_batch()
    batch = batch if width else batch.replace(span=batch.span[:, :0])
    x = jnp.zeros((*batch.tokens.shape, SPEC.embed_dim), dtype)  # padding may be all zeros, the norm's hardest case

    def total(leaves, x):
        return cal.apply(leaves, Site(x, x, batch.positions, batch.segments, batch.span, 2)).astype(jnp.float32).sum()

    value, grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(leaves, x)
    chex.assert_tree_all_finite((value, grads))
    noise = jax.random.normal(jax.random.key(1), x.shape, dtype)
    chex.assert_tree_all_finite(jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(leaves, 100 * noise))


def test_attention_over_nothing_is_an_exact_zero():
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 3, 4, 8)) for i in range(3))
    mask = jnp.array([[[False] * 3, [True, False, False], [True] * 3]])
    run = jax.jit(attend)
    out = run(q, k, v, mask)
    chex.assert_trees_all_equal(out[0, 0], jnp.zeros((4, 8)))
    np.testing.assert_allclose(out[0, 1], v[0, 0], rtol=1e-6)
    for scale in (1e-30, 1e4):  # scores of any size
        slope = jax.grad(lambda *a: run(*a, mask).sum(), argnums=(0, 1, 2))(q * scale, k, v)
        chex.assert_tree_all_finite(slope)
        chex.assert_trees_all_equal(slope[0][0, 0], jnp.zeros((4, 8)))


@pytest.mark.parametrize("keys", ["span", "all"])
def test_all_zero_projections_receive_a_gradient_at_initialisation(keys):
    model = tiny.model(SPEC, "late8th", keys=keys, copy=True)
    backbone, batch = tiny.backbone(SPEC), mixed_batch()
    adapters = model.init_adapters(jax.random.key(0))

    def loss(adapters):
        logits = model.logits({"backbone": backbone, "adapters": adapters}, batch)
        return jax.nn.log_softmax(logits)[..., 3].mean()

    for path, slope in trees.flatten(jax.jit(jax.grad(loss))(adapters)).items():
        if path.split("/")[-1] in ("w_o", "w_down", "w_copy"):
            assert np.abs(slope).max() > 1e-7, path


def test_only_the_output_projections_start_at_zero():
    cal = Cal(tiny.cal_config(SPEC, copy=True), (3, 4))
    leaves = trees.flatten(cal.init(jax.random.key(0)))
    assert {path.split("/")[0] for path in leaves} == {"boundary_3", "boundary_4"}
    for path, leaf in leaves.items():
        zero = path.split("/")[-1] in ("w_o", "w_down", "w_copy")
        assert leaf.dtype == jnp.float32 and bool((leaf == 0).all()) == zero, path
    assert (leaves["boundary_3/w_q"] != leaves["boundary_4/w_q"]).any()
    assert leaves["boundary_3/w_q"].shape == (32, 4, 8) and leaves["boundary_3/w_k"].shape == (32, 2, 8)
    assert 0.5 < float(leaves["boundary_3/w_q"].std() * 32**0.5) < 1.5  # fan-in scaling


def shapes(jaxpr):
    """The shapes of all intermediate values, those of inner functions too."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {tuple(out.aval.shape) for out in equation.outvars}
        for inner in jax.core.jaxprs_in_params(equation.params):
            found |= shapes(inner)
    return found


def test_the_cost_is_length_times_span():
    length, width = 70, 11
    cal = Cal(tiny.cal_config(SPEC), (2,))
    leaves = cal.init(jax.random.key(0))["boundary_2"]
    whole = jnp.zeros((1, length), jnp.int32)
    site = Site(
        jnp.zeros((1, length, 32)), jnp.zeros((1, length, 32)), whole, whole + 1, jnp.zeros((1, width), jnp.int32), 2
    )
    found = shapes(jax.make_jaxpr(cal.apply)(leaves, site).jaxpr)
    assert (1, 2, 2, length, width) in found  # the scores
    assert not any(shape.count(length) > 1 for shape in found)


def test_decoding_state_is_made_once_and_never_grows():
    cal = Cal(tiny.cal_config(SPEC), (2,))
    leaves = tiny.perturbed(cal.init(jax.random.key(0))["boundary_2"])
    batch = tiny.packed([[c] for c in tiny.conversations((9, 12, 7, 13))], 16, left_pad=True)
    x = jax.random.normal(jax.random.key(1), (4, 16, 32))
    _, state = cal.prefill(leaves, Site(x, x, batch.positions, batch.segments, batch.span, 2), capacity=64)
    assert state["k"].shape == (4, 8, 2, 8)
    one = jnp.ones((4, 1), jnp.int32)
    _, after = cal.decode(leaves, Site(x[:, :1], x[:, :1], one, one, jnp.zeros((4, 0), jnp.int32), 2), state)
    chex.assert_trees_all_equal(after, state)


def test_copying_needs_no_training_on_a_token():
    """A gate that is open at one position raises the logit of the token that is attended to, whichever token that is."""
    spec = tiny.spec()
    model, plain = tiny.model(spec, "4", copy=True), tiny.model(spec)
    params = {"backbone": tiny.backbone(spec), "adapters": model.init_adapters(jax.random.key(0))}
    leaves = params["adapters"]["cal"]["boundary_4"]
    run, run_plain, states = jax.jit(model.logits), jax.jit(plain.logits), jax.jit(plain.hidden)
    for seed in range(5):
        tokens = np.random.default_rng(seed).permutation(spec.vocab_size)[:9].astype(np.int32)
        batch = tiny.packed([[tiny.Conversation(tokens, np.arange(9) == 1)]], 16, 8)
        before, x = (np.asarray(f(params, batch))[0, 8] for f in (run_plain, states))
        opened = leaves | {"w_copy": jnp.asarray(np.tile(40 * np.sign(x)[:, None], (1, spec.num_heads)), jnp.float32)}
        changed = {**params, "adapters": {"cal": {"boundary_4": opened}}}
        after = np.asarray(run(changed, batch))[0, 8]
        assert (after - before).argmax() == tokens[1]


def test_default_mlp_dim():
    assert [default_mlp_dim(d) for d in (576, 1536, 4096, 100, 255)] == [256, 768, 2048, 50, 127]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": "none"}, "cal.keys_from: 'none' is not known"),
        ({"mlp_dim": -1}, "cal.mlp_dim: an mlp cannot be -1 wide"),
        ({"head_dim": 7, "rope_theta": 1e4}, "cal.rope: the head width 7 is odd"),
    ],
)
def test_bad_values_name_their_field(changes, message):
    with pytest.raises(UserError, match=message):
        tiny.cal_config(SPEC, **changes)
    assert CalConfig.__dataclass_params__.frozen


@pytest.mark.parametrize("changes", [{}, {"keys": "all"}, {"rope_theta": 100.0}])
def test_span_attention_is_what_the_block_uses(changes):
    """Weights times values through W_O, and no mlp, are what the block adds; with keys from everywhere, its span part."""
    model = tiny.model(SPEC, "3", gate_mlp_by_span=False, **changes)
    cal, batch = model.adapters[0], mixed_batch()
    leaves = tiny.params(model)["adapters"]["cal"]["boundary_3"] | {"w_down": jnp.zeros((24, SPEC.embed_dim))}
    x = jnp.asarray(np.random.default_rng(0).normal(size=(*batch.tokens.shape, SPEC.embed_dim)), jnp.float32)
    site = Site(x, x, batch.positions, batch.segments, batch.span, 3)
    weights = np.asarray(jax.jit(cal.span_attention)(leaves, site))
    assert weights.shape == (len(x), SPEC.num_heads, x.shape[1], batch.span.shape[1])
    sees = np.asarray(model_sees(batch))
    totals = weights.sum(-1)
    if "keys" in changes:
        assert (totals < 1 + 1e-5).all() and (totals[~np.broadcast_to(sees[:, None], totals.shape)] == 0).all()
        return
    np.testing.assert_allclose(totals, np.broadcast_to(sees[:, None], totals.shape), atol=1e-5)
    normed = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + 1e-5) * leaves["attn_norm"]
    values = np.einsum("btd,dkh->btkh", normed, leaves["w_v"]).repeat(SPEC.num_heads // SPEC.num_kv_heads, axis=2)
    values = np.stack([row[np.maximum(slots, 0)] for row, slots in zip(values, batch.span)])
    expected = np.einsum("bnts,bsnh,nhd->btd", weights, values, leaves["w_o"])
    np.testing.assert_allclose(cal.apply(leaves, site) - x, expected, rtol=1e-4, atol=1e-5)


def model_sees(batch):
    """[B, T]: whether any position of the span lies before, in the same segment."""
    here = np.arange(batch.tokens.shape[1])
    system, same = batch.system, batch.segments[:, :, None] == batch.segments[:, None, :]
    return (system[:, None, :] & same & (here[None, None, :] <= here[None, :, None]) & (batch.segments > 0)[..., None]).any(
        -1
    )
