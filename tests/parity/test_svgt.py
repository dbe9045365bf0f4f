"""SVGT's modules against torch's own (TransformerEncoderLayer, MultiheadAttention, autograd), one unpadded example at a time."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.value_bridge import Bridge, BridgeConfig
from calyrex_jax.adapters.value_space import ValueSpace, ValueSpaceConfig
from calyrex_jax.core import trees
from tests import tiny

torch = pytest.importorskip("torch", reason="the reference is written in torch")
F = torch.nn.functional

D, Z, HEADS = 20, 12, 3
KINDS = [(p, a, c) for p, a, c in itertools.product(("last", "attention"), ("mlp", "blocks"), (True, False))]


def tensor(array):
    return torch.tensor(np.asarray(array), dtype=torch.float64)


def linear(leaves, name, x):
    return F.linear(x, leaves[f"{name}/kernel"].T, leaves[f"{name}/bias"])


def norm(leaves, name, x):
    return F.layer_norm(x, x.shape[-1:], leaves[f"{name}/scale"], leaves[f"{name}/bias"], 1e-5)


def fill_attention(module, leaves, name):
    """Our leaves in torch's places; the bias of keys, which cannot matter, is random there."""
    dim = module.embed_dim
    kernels = [leaves[f"{name}/{part}/kernel"].reshape(dim, dim).T for part in ("query", "key", "value")]
    query, value = (leaves[f"{name}/{part}/bias"].reshape(dim) for part in ("query", "value"))
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.cat(kernels))
        module.in_proj_bias.copy_(torch.cat([query, torch.randn(dim), value]))
        module.out_proj.weight.copy_(leaves[f"{name}/out/kernel"].reshape(dim, dim).T)
        module.out_proj.bias.copy_(leaves[f"{name}/out/bias"])
    return module


def attention(leaves, name, dim, heads):
    return fill_attention(torch.nn.MultiheadAttention(dim, heads, batch_first=True).double(), leaves, name)


def block(leaves, name, lone=False):
    """torch's encoder layer with our leaves; over one vector its queries and keys are random, because they cannot matter."""
    made = torch.nn.TransformerEncoderLayer(Z, HEADS, 4 * Z, 0.0, "gelu", 1e-5, batch_first=True, norm_first=False).double()
    if lone:
        with torch.no_grad():
            made.self_attn.in_proj_weight[2 * Z :].copy_(leaves[f"{name}/value/kernel"].T)
            made.self_attn.in_proj_bias[2 * Z :].copy_(leaves[f"{name}/value/bias"])
            made.self_attn.out_proj.weight.copy_(leaves[f"{name}/out/kernel"].T)
            made.self_attn.out_proj.bias.copy_(leaves[f"{name}/out/bias"])
    else:
        fill_attention(made.self_attn, leaves, f"{name}/attn")
    with torch.no_grad():
        for ours, theirs in (("up", made.linear1), ("down", made.linear2)):
            theirs.weight.copy_(leaves[f"{name}/rest/{ours}/kernel"].T)
            theirs.bias.copy_(leaves[f"{name}/rest/{ours}/bias"])
        for ours, theirs in (("attn_norm", made.norm1), ("mlp_norm", made.norm2)):
            theirs.weight.copy_(leaves[f"{name}/rest/{ours}/scale"])
            theirs.bias.copy_(leaves[f"{name}/rest/{ours}/bias"])
    return made


def expected_values(leaves, config, response, prompt):
    """z [T, Z] of every prefix of one response [T, D], or [1, Z] of the whole; prompt [P, D] or None."""
    x = F.gelu(linear(leaves, "response", response))[None]
    if prompt is not None:
        p = F.layer_norm(F.gelu(linear(leaves, "conditional/prompt", prompt)), (Z,))[None]
        x = F.layer_norm(x, (Z,))
        seen = attention(leaves, "conditional/attn", Z, HEADS)(x, p, p, need_weights=False)[0]
        x = x + leaves["conditional/strength"] * norm(leaves, "conditional/norm", seen)
    count = x.shape[1]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(count, dtype=torch.float64) if config.causal else None
    for i in range(2):
        x = block(leaves, f"encoder_{i}")(x, src_mask=mask)
    ends = range(1, count + 1) if config.causal else [count]
    if config.pooling == "last":
        pooled = [x[0, end - 1] for end in ends]
    else:
        pooled = [torch.softmax(x[0, :end] @ leaves["pool"] / Z**0.5, 0) @ x[0, :end] for end in ends]
    pooled = torch.stack(pooled)
    if config.aggregate == "mlp":
        return norm(leaves, "aggregate/norm", F.gelu(linear(leaves, "aggregate/map", pooled)))
    for i in range(2):
        pooled = block(leaves, f"aggregate_{i}", lone=True)(pooled[:, None])[:, 0]
    return pooled


def expected_score(leaves, z):
    return linear(leaves, "discriminator/out", F.gelu(linear(leaves, "discriminator/hidden", z)))[..., 0]


def random_state(part, seed=1):
    params = tiny.noise(jax.eval_shape(part.init, jax.random.key(0)), seed, 0.4)
    return params, {path: tensor(leaf) for path, leaf in trees.flatten(params).items()}


def states(seed, shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("pooling", "aggregate", "causal"), KINDS)
@pytest.mark.parametrize("conditional", [False, True])
def test_values_equal_torchs(pooling, aggregate, causal, conditional):
    config = ValueSpaceConfig(D, Z, HEADS, pooling, aggregate, causal)
    value = ValueSpace(config)
    params, leaves = random_state(value)
    response, prompt = states(2, (3, 9, D)), states(3, (3, 7, D))
    rows, asked = [range(0, 9), range(0, 4), range(3, 9)], [range(2, 7), range(0, 7), range(0, 1)]
    mask, prompt_mask = np.zeros((3, 9), bool), np.zeros((3, 7), bool)
    for i in range(3):
        mask[i, rows[i]] = prompt_mask[i, asked[i]] = True
    extra = (prompt, prompt_mask) if conditional else ()
    z = jax.jit(value.values)(params, response, mask, *extra)
    assert z.shape == (3, 9 if causal else 1, Z) and z.dtype == jnp.float32
    for i in range(3):
        theirs = expected_values(
            leaves, config, tensor(response[i, rows[i]]), tensor(prompt[i, asked[i]]) if extra else None
        )
        ours = z[i, mask[i]] if causal else z[i]
        np.testing.assert_allclose(ours, theirs.detach(), rtol=0, atol=1e-5)


def test_score_and_correction_equal_torchs():
    value = ValueSpace(ValueSpaceConfig(D, Z, HEADS, step=0.7))
    params, leaves = random_state(value)
    z = states(4, (64, Z))
    wide = tensor(z).requires_grad_()
    score = expected_score(leaves, wide)
    slope = torch.autograd.grad(score.sum(), wide)[0]
    expected = (-0.7 * F.relu(score)[:, None] * slope / slope.pow(2).sum(-1, keepdim=True)).detach()
    assert 8 < int((score > 0).sum()) < 56
    np.testing.assert_allclose(jax.jit(value.score)(params, z), score.detach(), rtol=0, atol=1e-5)
    np.testing.assert_allclose(jax.jit(value.correction)(params, z), expected, rtol=0, atol=1e-5)


def test_bridge_equals_torchs():
    config = BridgeConfig(embed_dim=D, value_dim=Z, num_tokens=5, num_heads=4)
    bridge = Bridge(config)
    params, leaves = random_state(bridge)
    h_v, dz = states(5, (3, D)), states(6, (3, Z))
    lifted = linear(leaves, "lift_out", F.gelu(linear(leaves, "lift_hidden", tensor(dz))))
    context = torch.stack([tensor(h_v), lifted], 1)
    seeds = leaves["seeds"].expand(3, 5, D)
    raw = attention(leaves, "attn", D, 4)(seeds, context, context, need_weights=False)[0]
    gate = F.softplus(leaves["strength"])
    expected = norm(leaves, "norm", tensor(h_v)[:, None] + gate * raw).detach()
    np.testing.assert_allclose(jax.jit(bridge.propose)(params, h_v, dz), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(bridge.gate(params), gate, rtol=0, atol=1e-6)
