import os
import subprocess
import sys

import pytest

from tests.weights.checkpoints import config_for, random_tensors, write

# Eight devices need a flag that must be set before JAX starts, hence a process of its own.
_SCRIPT = """
import sys
import chex
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.trees import flatten
from calyrex_jax.weights.load import export_backbone, load_backbone
from calyrex_jax.weights.sources import resolve

source = resolve(sys.argv[1])
spec = DecoderSpec.from_config(source.config)
whole = load_backbone(source, spec, "float32")
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
for order in ((("y", 4), ("x", 2)), (("x", 2), ("y", 4)), ()):   # heads' widths are split too; () replicates
    def place(leaf, order=order):
        axes, free = [None] * leaf.ndim, list(order)
        for axis in range(leaf.ndim - 1, 0, -1):     # whatever divides, never the layer axis
            fitting = next(((name, size) for name, size in free if leaf.shape[axis] % size == 0), None)
            if fitting:
                free.remove(fitting)
                axes[axis] = fitting[0]
        return NamedSharding(mesh, P(*axes))
    shardings = jax.tree.map(place, abstract_params(spec, "float32"))
    tree = load_backbone(source, spec, "float32", shardings)
    for path, leaf in flatten(tree).items():
        assert leaf.sharding == flatten(shardings)[path], path
    split = sum(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(tree))
    assert (split > 5) == bool(order), split
    chex.assert_trees_all_equal(jax.device_get(tree), jax.device_get(whole))
export_backbone(tree, spec, sys.argv[2])
again = load_backbone(resolve(sys.argv[2]), spec, "float32")
chex.assert_trees_all_equal(again, whole)
print("equal")
"""


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_sharding_loads_the_same_values(tmp_path, family):
    config = config_for(family)
    directory = write(tmp_path / "in", config, random_tensors(config), shards=2)
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-c", _SCRIPT, str(directory), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("equal\n")
