import os
import subprocess
import sys

import numpy as np
import pytest

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.trees import flatten
from calyrex_jax.weights import mapping, safetensors
from calyrex_jax.weights.reader import TensorInfo
from tests.weights.checkpoints import BF16, config_for, write

# A process of its own: the peak of this one holds whatever other tests needed.
_SCRIPT = """
import sys
import jax
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

name, dtype, sharded = sys.argv[1:]
devices = jax.devices()
before = memory("VmRSS")
source = resolve(name)
spec = DecoderSpec.from_config(source.config)
shardings = None
if sharded == "sharded":
    from calyrex_jax.backbones.decoder import abstract_params
    mesh = jax.sharding.Mesh(devices, ("x",))
    place = lambda leaf: jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * (leaf.ndim - 1), "x"))
    shardings = jax.tree.map(place, abstract_params(spec, dtype))
tree = load_backbone(source, spec, dtype, shardings)
leaves = jax.tree.leaves(tree)
print(memory("VmHWM") - before, sum(leaf.nbytes for leaf in leaves), max(leaf.nbytes for leaf in leaves), len(devices))
"""

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def _measure(name, dtype, sharded="whole"):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"} if sharded == "sharded" else None
    command = [sys.executable, "-c", _SCRIPT, name, dtype, sharded]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return tuple(int(word) for word in done.stdout.split())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A bfloat16 checkpoint of 300 MB."""
    config = config_for("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=8192)
    config |= {"num_attention_heads": 16, "num_key_value_heads": 16}
    spec = DecoderSpec.from_config(config)
    abstract = flatten(abstract_params(spec, BF16))
    infos = {}
    for path, row in mapping.rows_for("directory", spec, abstract).items():
        shape = abstract[path].shape
        layers = range(shape[0]) if path.startswith("layers/") else range(1)
        stored = mapping.stored_shape(row, shape[1:] if path.startswith("layers/") else shape)
        infos |= {row.name.format(layer): TensorInfo(stored, "bfloat16") for layer in layers}
    pattern = np.random.default_rng(0).normal(size=4099).astype(BF16)
    directory = write(tmp_path_factory.mktemp("large"), config, {})
    safetensors.write(directory / "model.safetensors", infos, lambda name: np.resize(pattern, infos[name].shape))
    assert (directory / "model.safetensors").stat().st_size > 290e6
    return directory


@linux
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "sharded"), [("bfloat16", "whole"), ("float32", "whole"), ("bfloat16", "sharded")])
def test_the_peak_is_the_weights_and_one_leaf(large, dtype, sharded):
    peak, weights, largest, devices = _measure(str(large), dtype, sharded)
    assert devices == (4 if sharded == "sharded" else 1)
    assert weights > (290e6 if dtype == "bfloat16" else 580e6)
    assert peak <= weights + largest + 100e6, f"peak {peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_peak_of_a_real_quantised_file(smollm2_source, dtype):
    peak, weights, largest, _ = _measure(smollm2_source.name, dtype)
    assert peak <= weights + largest + 100e6, f"peak {peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"
