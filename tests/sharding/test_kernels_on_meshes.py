"""An attention kernel on meshes of four devices gives what one device gives: outputs and gradients, and those of a model."""

import os
import subprocess
import sys

import pytest

from tests import tiny_runs

SCRIPT = """
from dataclasses import replace
import jax, jax.numpy as jnp, numpy as np
from calyrex_jax.backbones import kernels
from calyrex_jax.backbones.attention import attend_tokens
from calyrex_jax.core.placing import on_mesh
from calyrex_jax.sharding.mesh import make_mesh
from calyrex_jax.sharding.rules import BACKBONE_RULES, batch_sharding, shardings
from tests import tiny
from tests.backbones.test_kernels import H, T, packed_tokens, random_inputs

def close(ours, theirs, tolerance):
    for got, want in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, atol=tolerance * np.abs(want).max())

tokens, inputs = jax.tree.map(lambda a: jnp.concatenate([a, a]), (packed_tokens(), random_inputs()))
this = kernels.Pass(T, H, inputs[0].dtype)

def gradients(fn, inputs):
    return jax.jit(jax.value_and_grad(lambda qkv: jnp.sum(jnp.sin(fn(*qkv)))))(inputs)

want = gradients(lambda q, k, v: attend_tokens(q, k, v, tokens, tokens, None, ordered=True), inputs)
for sizes in ((2, 1, 2), (1, 1, 4)):  # the last has more parts than key/value heads
    mesh = make_mesh(*sizes)
    def ours(q, k, v):
        with on_mesh(mesh):
            return kernels.attend("splash", this, q, k, v, tokens, None)
    close(gradients(ours, jax.device_put(inputs, batch_sharding(mesh))), want, 1e-5)
    assert "shard_map" in str(jax.make_jaxpr(ours)(*inputs))

mesh = make_mesh(1, 2, 2)
model = tiny.model(tiny.spec(vocab_size=100), "3")
params, batch = tiny.params(model), tiny.packed([tiny.conversations((9, 14))] * 2, 32)

def losses(model, mesh):
    def loss(adapters, backbone, batch):
        with on_mesh(mesh):
            return jnp.sum(jnp.sin(model.hidden({"backbone": backbone, "adapters": adapters}, batch)) * (batch.segments > 0)[..., None])
    return jax.jit(jax.value_and_grad(loss))

alone = losses(replace(model, attention="xla"), None)(params["adapters"], params["backbone"], batch)
placed = jax.device_put(params["backbone"], shardings(params["backbone"], BACKBONE_RULES, mesh))
rows = jax.tree.map(lambda a: jax.device_put(a, batch_sharding(mesh)), batch)
close(losses(replace(model, attention="splash"), mesh)(params["adapters"], placed, rows), alone, 2e-5)
print("ALL CLOSE")
"""


@pytest.mark.slow
def test_kernels_on_meshes():
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, env=os.environ | flags, cwd=tiny_runs.ROOT, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0 and "ALL CLOSE" in done.stdout, done.stderr[-3000:]
