"""Attention kernels against XLA's products: splash in Pallas' interpreter, and what can be known of cuDNN without a GPU."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from calyrex_jax.backbones import kernels
from calyrex_jax.backbones.attention import Tokens, attend_tokens
from calyrex_jax.backbones.kernels import Pass, choose
from calyrex_jax.config import check, default_config
from calyrex_jax.core.errors import UserError
from calyrex_jax.model import Model
from tests import tiny

B, T, N, K, H = 2, 200, 4, 2, 8
LONG = Pass(length=2048, head_dim=128, dtype=jnp.dtype("bfloat16"))


def packed_tokens():
    """A row of two segments and padding behind them, and a row padded on the left."""
    positions, segments = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for row, first, length, number in ((0, 0, 70, 1), (0, 70, 90, 2), (1, 45, T - 45, 1)):
        positions[row, first : first + length] = np.arange(length)
        segments[row, first : first + length] = number
    return Tokens(jnp.asarray(positions), jnp.asarray(segments))


def random_inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, T, heads, H)), dtype) for heads in (N, K, K)]


def value_and_gradients(fn, inputs):
    def loss(*inputs):
        out = fn(*inputs)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*inputs)
    return [np.asarray(array, np.float32) for array in (out, *gradients)]


def kernel_calls(program):
    """The phases of the splash kernels in a program, in order; loops count once, and what nobody reads does not."""
    jaxpr, found = getattr(program, "jaxpr", program), []
    for equation in partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0].eqns:
        if equation.primitive.name == "pallas_call":
            found += re.findall(r"splash_mha_(fwd|dq|dkv)", str(equation.params))[:1]
        else:
            inner = jax.tree.leaves(equation.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr"))
            found += [
                call for each in inner if hasattr(each, "eqns") or hasattr(each, "jaxpr") for call in kernel_calls(each)
            ]
    return found


@pytest.mark.parametrize(
    ("window", "dtype", "tolerance"), [(None, jnp.float32, 1e-5), (30, jnp.float32, 1e-5), (None, jnp.bfloat16, 1e-2)]
)
def test_splash_equals_the_products_on_packed_and_padded_rows(window, dtype, tolerance):
    tokens, inputs = packed_tokens(), random_inputs(dtype)
    this = Pass(T, H, inputs[0].dtype, frozenset((window,)))
    ours = value_and_gradients(lambda *qkv: kernels.attend("splash", this, *qkv, tokens, window), inputs)
    theirs = value_and_gradients(lambda *qkv: attend_tokens(*qkv, tokens, tokens, window, ordered=True), inputs)
    padding = np.asarray(tokens.segments) == 0
    for got, want in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())
        assert np.all(got[padding] == 0) and np.all(np.isfinite(got))


def test_a_model_with_splash_equals_one_without():
    model = replace(tiny.model(tiny.spec("mistral"), "3"), attention="splash")  # a window of five
    params, talks = tiny.params(model), tiny.conversations((9, 14, 5, 12))
    batch = tiny.packed([talks, talks[1:2]], 44, width=12, left_pad=True)

    def run(model):
        def loss(adapters):
            logits = model.logits(params | {"adapters": adapters}, batch)
            return jnp.sum(jnp.where(batch.segments[..., None] > 0, jnp.sin(logits), 0)), logits

        (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params["adapters"])
        return [np.asarray(logits), *map(np.asarray, jax.tree.leaves(gradients))]

    # one in the loop over the layers below the block, one behind it
    assert kernel_calls(jax.make_jaxpr(model.logits)(params, batch)) == ["fwd"] * 2
    for got, want in zip(run(model), run(replace(model, attention="xla")), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


def test_the_backward_pass_keeps_what_splash_gave():
    model = replace(tiny.model(tiny.spec(), "1"), attention="splash")
    params, batch = tiny.params(model), tiny.packed([tiny.conversations((9, 14))], 32)

    def loss(adapters):
        return jnp.sum(model.hidden(params | {"adapters": adapters}, batch))

    # the layer below the block, then those behind it in one loop: forward once, backward once, not forward again
    assert sorted(kernel_calls(jax.make_jaxpr(jax.grad(loss))(params["adapters"]))) == ["dkv", "dq", "fwd", "fwd"]


def test_prompts_are_read_by_splash_and_decoded_without():
    model = replace(tiny.model(tiny.spec(), "3"), attention="splash")
    tiny.assert_cached_equals_uncached(model, tiny.params(model), new_tokens=3)


@pytest.mark.parametrize(
    ("name", "where", "changes", "kernel"),
    [
        ("auto", "tpu", {}, "splash"),
        ("auto", "gpu", {}, "cudnn"),
        ("auto", "cpu", {}, "xla"),
        ("xla", "tpu", {}, "xla"),
        ("splash", "tpu", {"length": 20}, "splash"),
        ("auto", "tpu", {"length": 20}, "xla"),
        ("splash", "tpu", {"length": 1}, "xla"),
        ("auto", "tpu", {"versions": True}, "xla"),
        ("splash", "tpu", {"versions": True}, "xla"),
        ("auto", "tpu", {"head_dim": 20}, "xla"),
        ("auto", "tpu", {"dtype": jnp.dtype("float32")}, "splash"),
        ("auto", "gpu", {"dtype": jnp.dtype("float32")}, "xla"),
        ("auto", "gpu", {"head_dim": 256}, "xla"),
        ("auto", "gpu", {"length": 32768}, "xla"),
        ("auto", "tpu", {"length": 32768}, "splash"),
        ("auto", "tpu", {"windows": frozenset((1024,))}, "splash"),
        ("auto", "tpu", {"windows": frozenset((1024,)), "gaps": True}, "xla"),
        ("auto", "tpu", {"gaps": True}, "splash"),
        ("auto", "tpu", {"windows": frozenset((1024, None))}, "xla"),
        ("auto", "tpu", {"windows": frozenset((4096, None))}, "splash"),  # hides nothing at this length
        ("auto", "gpu", {"windows": frozenset((1024, None)), "gaps": True}, "cudnn"),
    ],
)
def test_what_computes_a_pass(name, where, changes, kernel):
    assert choose(name, where, replace(LONG, **changes)) == kernel


@pytest.mark.parametrize(("found", "kernel"), [("9.0", "cudnn"), ("8.6", "cudnn"), ("7.5", "xla"), ("gfx90a", "xla")])
def test_auto_asks_the_gpu_for_flash_attention(monkeypatch, found, kernel):
    device = type("Device", (), {"compute_capability": found})()
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert choose("auto", "gpu", LONG) == kernel


@pytest.mark.parametrize(
    ("name", "where", "head_dim", "dtype", "said"),
    [
        ("splash", "cpu", 64, "float32", "config.attention=splash runs on TPUs, and this is for cpu; set config.attention"),
        ("cudnn", "tpu", 64, "bfloat16", "config.attention=cudnn runs on NVIDIA GPUs, and this is for tpu"),
        ("cudnn", "gpu", 64, "float32", "config.attention=cudnn takes 16-bit floats, not config.backbone.dtype=float32"),
        ("cudnn", "gpu", 256, "bfloat16", "config.attention=cudnn takes heads of a multiple of 8 up to 128, not 256"),
        ("splash", "tpu", 20, "bfloat16", "config.attention=splash takes heads of a multiple of 8, not 20"),
    ],
)
def test_a_kernel_that_cannot_work_is_one_line(name, where, head_dim, dtype, said):
    with pytest.raises(UserError) as caught:
        kernels.check_attention(name, where, head_dim, jnp.dtype(dtype))
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "where"), [("auto", "gpu"), ("xla", "cpu"), ("splash", "tpu"), ("auto", "cpu")])
def test_what_can_work_passes(name, where):
    kernels.check_attention(name, where, 64, jnp.dtype("float32"))


def test_an_unknown_kernel_is_one_line():
    config = default_config()
    config.backbone.source, config.attention = "model", "flash"
    with pytest.raises(UserError, match=r"config.attention is 'flash'; known: auto, xla, cudnn, splash"):
        check(config)
    assert Model(tiny.spec()).attention == default_config().attention == "auto"


def test_cudnn_is_asked_for_the_same_mask_and_no_scale(monkeypatch):
    """Its arguments, computed by jax's own reference; the kernel itself needs a GPU."""
    tokens, inputs = packed_tokens(), random_inputs()
    theirs, asked = jax.nn.dot_product_attention, []

    def reference(*args, implementation, **kwargs):
        asked.append(implementation)
        return theirs(*args, implementation="xla", **kwargs)

    monkeypatch.setattr(jax.nn, "dot_product_attention", reference)
    for length, window in ((T, None), (T - 1, 30)):
        cut, qkv = tokens.part(0, length), [array[:, :length] for array in inputs]
        this = Pass(length, H, qkv[0].dtype, frozenset((window,)))
        ours = value_and_gradients(lambda *a: kernels.attend("cudnn", this, *a, cut, window), qkv)  # noqa: B023
        want = value_and_gradients(lambda *a: attend_tokens(*a, cut, cut, window, ordered=True), qkv)  # noqa: B023
        for got, expected in zip(ours, want, strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max())
    assert asked == ["cudnn"] * 2


def test_cudnn_lowers_for_cuda(monkeypatch):
    """The program that a GPU would be given, down to cuDNN's own operations; it is compiled on no machine without one."""
    stablehlo = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(stablehlo, "check_cudnn_version", lambda: 91000)  # asked of the CUDA plugin, which is not here
    shapes = [jax.ShapeDtypeStruct((B, 129, heads, 64), jnp.bfloat16) for heads in (N, K, K)]
    rows = jax.ShapeDtypeStruct((B, 129), jnp.int32)

    def loss(q, k, v, positions, segments):
        return jnp.sum(kernels.cudnn(q, k, v, Tokens(positions, segments), 40).astype(jnp.float32))

    traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*shapes, rows, rows)
    assert set(kernels.KEPT) & set(re.findall(r"= (\w+)\[", str(traced.jaxpr)))  # what the backward pass is to keep
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r"@(__cudnn\S+?)\(", text) == [
        "__cudnn$fmhaScaleBiasSoftmax",
        "__cudnn$fmhaScaleBiasSoftmaxBackward",
    ]
    assert text.count(r"\22fmha_scale\22: 1.0") == 2 and text.count(r"\22mask_type\22: \22CAUSAL\22") == 2
