"""A quantised load equals the plain one quantised layer by layer, from safetensors and from GGUF, whatever the placing."""

import jax
import numpy as np
import pytest

from calyrex_jax.backbones import decoder
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core import quantized, trees
from calyrex_jax.sharding.mesh import make_mesh
from calyrex_jax.sharding.rules import BACKBONE_RULES, shardings
from calyrex_jax.weights import load
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve
from tests.weights.checkpoints import config_for, random_tensors, write
from tests.weights.gguf_files import write_gguf


def source_of(kind, family, place):
    if kind == "gguf":
        write_gguf(place / "m.gguf", family)
        return resolve(str(place / "m.gguf"))
    config = config_for(family)
    write(place / "m", config, random_tensors(config))
    return resolve(str(place / "m"))


def encoded(path, leaf, kind):
    """The parts of a plain leaf, by the encoder alone."""
    axes = quantized.input_axes(path)
    if not path.startswith("layers/"):
        return quantized.encode(np.asarray(leaf), axes, kind)
    layers = [quantized.encode(np.asarray(w), axes, kind) for w in leaf]
    return {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}


@pytest.mark.parametrize("kind", ["int8", "int4", "nf4"])
@pytest.mark.parametrize(("source", "family"), [("directory", "llama"), ("directory", "gpt2"), ("gguf", "llama")])
def test_every_leaf_is_the_plain_one_encoded(source, family, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(load, "_TABLE_ROWS", 7)  # the tables in several pieces
    found = source_of(source, family, tmp_path)
    spec = DecoderSpec.from_config(found.config)
    plain = trees.flatten(load_backbone(found, spec, "float32"))
    placed = shardings(quantized.abstract(decoder.abstract_params(spec, np.float32), kind), BACKBONE_RULES, make_mesh())
    told = []
    made = load_backbone(found, spec, "float32", placed, lambda done, total: told.append((done, total)), kind=kind)
    assert told[-1][0] == told[-1][1]
    leaves = trees.flatten(made)
    for path, leaf in plain.items():
        if own := quantized.kind_of(path, kind):
            for name, want in encoded(path, leaf, own).items():
                got = leaves.pop(f"{path}/{name}")
                assert got.dtype == want.dtype, path
                np.testing.assert_array_equal(np.asarray(got), want, err_msg=path)
        else:
            np.testing.assert_array_equal(leaves.pop(path), leaf)
    assert not leaves
    assert jax.tree.structure(made) == jax.tree.structure(placed)


def test_one_layer_at_a_time_is_wide(tmp_path, monkeypatch):
    found = source_of("gguf", "llama", tmp_path)
    spec = DecoderSpec.from_config(found.config)
    seen = []
    read = load._Filler.read

    def reading(self, index):
        block = read(self, index)
        if self.layered and self.leaf.dtype == np.float32:
            seen.append(block.shape[0])
        return block

    monkeypatch.setattr(load._Filler, "read", reading)
    load_backbone(found, spec, "bfloat16", kind="int8")
    assert set(seen) == {1} and len(seen) == 7 * spec.num_layers
