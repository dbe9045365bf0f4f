"""CAL against an independent implementation in torch, built from its own masks and attention: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.adapters.api import Site
from calyrex_jax.adapters.cal import Cal
from tests import tiny

torch = pytest.importorskip("torch", reason="the reference is written in torch")


def rms_norm(x, scale):
    return torch.nn.functional.rms_norm(x, (x.shape[-1],), scale, eps=1e-5)


def pointed(leaves, config, x, normed, outputs, q, k, safe, blind):
    """The copying path, over all T × T pairs."""
    k = k.repeat_interleave(config.num_heads // config.num_kv_heads, dim=1)
    scores = (q @ k.transpose(-1, -2) / config.head_dim**0.5).masked_fill(~safe[:, None], float("-inf"))
    weights = scores.softmax(-1).masked_fill(blind[:, None, :, None], 0.0)
    gates = normed @ leaves["w_copy"] / config.embed_dim
    mean_square = x.pow(2).mean(-1, keepdim=True)
    return (mean_square + 1e-5).sqrt() * torch.einsum(
        "bnts,btn,bsd->btd", weights, gates, rms_norm(outputs, leaves["copy_scale"])
    )


def reference(leaves, config, x, outputs, segments, system):
    """X'' by torch's own attention over all T × T pairs, [B, T, D]; queries that see nothing are put right afterwards."""
    position = torch.arange(x.shape[1])
    same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, :, None] > 0)
    before = same & (position[None, :, None] >= position[None, None, :])
    in_span = before & system[:, None, :]
    mask = in_span if config.keys == "span" else before
    normed = rms_norm(x, leaves["attn_norm"])
    q, k, v = (torch.einsum("btd,dnh->bnth", normed, leaves[name]) for name in ("w_q", "w_k", "w_v"))
    blind = ~mask.any(-1)
    safe = mask | blind[..., None]  # torch gives NaN, or a mean, over nothing
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=safe[:, None], enable_gqa=True)
    attended = attended.masked_fill(blind[:, None, :, None], 0.0)
    middle = x + torch.einsum("bnth,nhd->btd", attended, leaves["w_o"])
    if config.copy:
        middle = middle + pointed(leaves, config, x, normed, outputs, q, k, safe, blind)
    normed = rms_norm(middle, leaves["mlp_norm"])
    mlp = torch.nn.functional.silu(normed @ leaves["w_gate"]) * (normed @ leaves["w_up"])
    out = middle + mlp @ leaves["w_down"]
    return torch.where(in_span.any(-1)[..., None], out, x) if config.gate_mlp_by_span else out


@pytest.mark.parametrize(
    "changes", [{}, {"keys": "all"}, {"gate_mlp_by_span": False}, {"num_kv_heads": 4}, {"num_kv_heads": 1}, {"copy": True}]
)
def test_values_and_gradients_equal_torchs(changes):
    config = tiny.cal_config(tiny.spec(), **changes)
    cal = Cal(config, (2,))
    leaves = tiny.perturbed(cal.init(jax.random.key(0))["boundary_2"])
    start, middle, none, several = tiny.conversations((9, 14, 5, 12))
    batch = tiny.packed([[start], [middle], [none], [several], [none, start, none], [middle, none]], 20)
    rng = np.random.default_rng(0)
    shape = (*batch.tokens.shape, config.embed_dim)
    x, weigh, outputs = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    weigh = weigh * (batch.segments > 0)[..., None]

    def total(leaves, x):
        out = cal.apply(leaves, Site(x, outputs, batch.positions, batch.segments, batch.span, 2))
        return (out * weigh).sum(), out

    (_, out), (slopes, slope_x) = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(leaves, jnp.asarray(x))

    wide = {name: torch.tensor(np.asarray(leaf), dtype=torch.float64, requires_grad=True) for name, leaf in leaves.items()}
    wide_x = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    segments, system = torch.tensor(batch.segments), torch.tensor(batch.system)
    expected = reference(wide, config, wide_x, torch.tensor(outputs, dtype=torch.float64), segments, system)
    (expected * torch.tensor(weigh)).sum().backward()

    real = batch.segments > 0
    close(np.asarray(out)[real], expected.detach().numpy()[real])
    close(np.asarray(slope_x)[real], wide_x.grad.numpy()[real])
    for name, slope in slopes.items():
        close(np.asarray(slope), wide[name].grad.numpy())


def close(found, expected):
    """To 1e-5 of the largest entry."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
