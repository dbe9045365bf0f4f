import json
import re
from concurrent.futures import ThreadPoolExecutor

import chex
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from calyrex_jax.backbones.decoder import abstract_params
from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.core.trees import flatten, match
from calyrex_jax.weights import load, mapping
from calyrex_jax.weights.load import export_backbone, load_backbone
from calyrex_jax.weights.sources import resolve
from tests.weights.checkpoints import BF16, D, F, H, K, L, N, V, config_for, random_tensors, write

FAMILIES = ("llama", "qwen2", "mistral", "gpt2")


def _load(directory, dtype="float32", **kwargs):
    source = resolve(str(directory))
    return load_backbone(source, DecoderSpec.from_config(source.config), dtype, **kwargs)


def _checkpoint(directory, family="llama", dtype=np.float32, shards=None, drop=(), add=None, **changes):
    config = config_for(family, **changes)
    tensors = random_tensors(config, dtype)
    tensors = {name: value for name, value in tensors.items() if name not in drop} | (add or {})
    return write(directory, config, tensors, shards), tensors


def _bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


@pytest.mark.parametrize("shards", [None, 3])
@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral"])
def test_every_leaf_is_the_stored_tensor_turned(tmp_path, family, shards):
    biases = {"attention_bias": True, "mlp_bias": True} if family == "llama" else {}
    directory, stored = _checkpoint(tmp_path, family, shards=shards, **biases)
    got = flatten(_load(directory))
    for i in range(L):
        base = f"model.layers.{i}."
        for x, heads in (("q", N), ("k", K), ("v", K)):
            expected = stored[f"{base}self_attn.{x}_proj.weight"].T.reshape(D, heads, H)
            np.testing.assert_array_equal(got[f"layers/attn/w_{x}"][i], expected)
            if family != "mistral":
                expected = stored[f"{base}self_attn.{x}_proj.bias"].reshape(heads, H)
                np.testing.assert_array_equal(got[f"layers/attn/b_{x}"][i], expected)
        np.testing.assert_array_equal(got["layers/attn/w_o"][i], stored[f"{base}self_attn.o_proj.weight"].T.reshape(N, H, D))
        for x in ("gate", "up", "down"):
            np.testing.assert_array_equal(got[f"layers/mlp/w_{x}"][i], stored[f"{base}mlp.{x}_proj.weight"].T)
        np.testing.assert_array_equal(got["layers/attn_norm/scale"][i], stored[f"{base}input_layernorm.weight"])
        np.testing.assert_array_equal(got["layers/mlp_norm/scale"][i], stored[f"{base}post_attention_layernorm.weight"])
    np.testing.assert_array_equal(got["embed/tokens"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(got["head/w"], stored["lm_head.weight"])
    np.testing.assert_array_equal(got["final_norm/scale"], stored["model.norm.weight"])


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_with_and_without_prefix_and_with_its_buffers(tmp_path, prefix):
    config = config_for("gpt2")
    stored = random_tensors(config)
    buffers = {f"h.{i}.attn.bias": np.tri(8, dtype=np.uint8)[None, None] for i in range(L)}
    buffers |= {f"h.{i}.attn.masked_bias": np.array(-1e4, np.float32) for i in range(L)}
    renamed = {prefix + name.removeprefix("transformer."): value for name, value in (stored | buffers).items()}
    got = flatten(_load(write(tmp_path, config, renamed)))
    for i in range(L):
        weight, bias = stored[f"transformer.h.{i}.attn.c_attn.weight"], stored[f"transformer.h.{i}.attn.c_attn.bias"]
        for part, x in enumerate("qkv"):
            columns = slice(part * D, (part + 1) * D)
            np.testing.assert_array_equal(got[f"layers/attn/w_{x}"][i], weight[:, columns].reshape(D, N, H))
            np.testing.assert_array_equal(got[f"layers/attn/b_{x}"][i], bias[columns].reshape(N, H))
        np.testing.assert_array_equal(
            got["layers/attn/w_o"][i], stored[f"transformer.h.{i}.attn.c_proj.weight"].reshape(N, H, D)
        )
        np.testing.assert_array_equal(got["layers/mlp/w_up"][i], stored[f"transformer.h.{i}.mlp.c_fc.weight"])
        np.testing.assert_array_equal(got["layers/mlp/b_down"][i], stored[f"transformer.h.{i}.mlp.c_proj.bias"])
        np.testing.assert_array_equal(got["layers/mlp_norm/bias"][i], stored[f"transformer.h.{i}.ln_2.bias"])
    np.testing.assert_array_equal(got["embed/positions"], stored["transformer.wpe.weight"])
    assert "head/w" not in got


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_export_of_import_is_bit_identical(tmp_path, family, dtype):
    directory, stored = _checkpoint(tmp_path / "in", family, dtype, shards=2)
    # float16 has no backbone type of its own: float32 holds it exactly
    held = "bfloat16" if np.dtype(dtype) == BF16 else "float32"
    backbone = _load(directory, held)
    spec = DecoderSpec.from_config(resolve(str(directory)).config)
    export_backbone(backbone, spec, tmp_path / "out", dtype)
    back = load_file(tmp_path / "out" / "model.safetensors")
    assert back.keys() == stored.keys()
    for name, value in stored.items():
        assert back[name].dtype == value.dtype and back[name].shape == value.shape
        np.testing.assert_array_equal(_bits(back[name]), _bits(value), err_msg=name)
    again = resolve(str(tmp_path / "out"))
    assert DecoderSpec.from_config(again.config) == spec
    chex.assert_trees_all_equal(load_backbone(again, spec, held), backbone)


def test_export_keeps_a_given_config(tmp_path):
    directory, _ = _checkpoint(tmp_path / "in", eos_token_id=[2, 7])
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    export_backbone(load_backbone(source, spec, "float32"), spec, tmp_path / "out", config=source.config)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == source.config | {"torch_dtype": "float32"}


def test_types_are_rounded_as_numpy_rounds_them(tmp_path):
    directory, stored = _checkpoint(tmp_path)
    got = flatten(_load(directory, "bfloat16"))
    assert {leaf.dtype for leaf in got.values()} == {BF16}
    np.testing.assert_array_equal(got["embed/tokens"], stored["model.embed_tokens.weight"].astype(BF16))
    np.testing.assert_array_equal(got["layers/mlp/w_up"][1], stored["model.layers.1.mlp.up_proj.weight"].T.astype(BF16))


def test_chunks_smaller_than_a_tensor_change_nothing(tmp_path, monkeypatch):
    directory, _ = _checkpoint(tmp_path, head_dim=6)
    whole = _load(directory)
    monkeypatch.setattr(load, "_CHUNK", 50)
    chex.assert_trees_all_equal(_load(directory), whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_block_of_a_leaf_can_be_read_alone(tmp_path, monkeypatch, family):
    monkeypatch.setattr(load, "_CHUNK", 50)
    directory, _ = _checkpoint(tmp_path, family)
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    reader, whole = load.open_reader(source), flatten(_load(directory))
    abstract, rng = flatten(abstract_params(spec, "float32")), np.random.default_rng(0)
    names = {name: name for name in reader.names()}
    with ThreadPoolExecutor(2) as pool:
        for path, row in mapping.rows_for("directory", spec, abstract).items():
            fill = load._Filler(reader, row, names, abstract[path], pool)
            for _ in range(4):
                ends = [sorted(rng.choice(size + 1, 2, replace=False)) for size in abstract[path].shape]
                index = tuple(slice(int(a), int(b)) for a, b in ends)
                np.testing.assert_array_equal(fill(index), whole[path][index], err_msg=f"{path} {index}")


def test_a_block_reads_only_its_own_rows(tmp_path):
    directory, _ = _checkpoint(tmp_path)
    source = resolve(str(directory))
    spec = DecoderSpec.from_config(source.config)
    leaf = flatten(abstract_params(spec, "float32"))["layers/mlp/w_up"]
    asked = []

    class Spy:
        def __init__(self, reader):
            self.names, self._rows = reader.names, reader.rows

        def rows(self, name, start, stop):
            asked.append((name, start, stop))
            return self._rows(name, start, stop)

    reader = Spy(load.open_reader(source))
    row = mapping.rows_for("directory", spec, ["layers/mlp/w_up"])["layers/mlp/w_up"]
    with ThreadPoolExecutor(1) as pool:
        fill = load._Filler(reader, row, {name: name for name in reader.names()}, leaf, pool)
        index = (slice(1, 2), slice(None), slice(F // 2, F))
        fill(index)
        fill(index)  # a second device with the same block
    assert asked == [("model.layers.1.mlp.up_proj.weight", F // 2, F)]


def test_the_tree_is_the_abstract_one_and_progress_reaches_the_end(tmp_path):
    directory, _ = _checkpoint(tmp_path)
    seen = []
    tree = _load(directory, progress=lambda done, total: seen.append((done, total)))
    spec = DecoderSpec.from_config(config_for("llama"))
    assert match(abstract_params(spec, "float32"), tree, "checkpoint") == []
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_one_device_sharding_gives_the_same_tree(tmp_path):
    directory, _ = _checkpoint(tmp_path)
    tree = _load(directory)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    placed = _load(directory, shardings=jax.tree.map(lambda _: sharding, tree))
    chex.assert_trees_all_equal(placed, tree)
    with pytest.raises(ValueError, match="embed/tokens"):
        _load(directory, shardings={"head": {"w": sharding}})


def test_all_faults_are_listed_at_once(tmp_path):
    directory, _ = _checkpoint(
        tmp_path,
        drop=["model.norm.weight", *(f"model.layers.{i}.mlp.up_proj.weight" for i in range(L))],
        add={
            "model.layers.0.self_attn.q_proj.bias": np.zeros(N * H, np.float32),
            "model.layers.1.self_attn.k_proj.weight": np.zeros((D, D), np.float32),
            "visual.patch": np.zeros(2, np.float32),
        },
    )
    with pytest.raises(UserError) as caught:
        _load(directory)
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "missing: model.norm.weight, model.layers.{0-2}.mlp.up_proj.weight",
        "unexpected: model.layers.0.self_attn.q_proj.bias, visual.patch",
        "misshapen: model.layers.1.self_attn.k_proj.weight (has (16, 16), expected (8, 16))",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("family", "changes", "name", "complaint"),
    [
        ("llama", {}, "model.layers.0.self_attn.q_proj.bias", "unexpected"),
        ("llama", {}, "model.layers.0.mlp.up_proj.bias", "unexpected"),
        ("llama", {}, f"model.layers.{L}.input_layernorm.weight", "unexpected"),
        ("mistral", {}, "model.layers.0.self_attn.q_norm.weight", "unexpected"),
        ("gpt2", {}, "h.0.attn.c_attn.scale", "unexpected"),
    ],
)
def test_a_tensor_that_nothing_consumes_is_refused(tmp_path, family, changes, name, complaint):
    directory, _ = _checkpoint(tmp_path, family, add={name: np.zeros(D, np.float32)}, **changes)
    with pytest.raises(UserError, match=f"{complaint}: {re.escape(name)}"):
        _load(directory)


def test_missing_qwen2_biases_are_refused(tmp_path):
    directory, _ = _checkpoint(tmp_path, "qwen2", drop=[f"model.layers.{i}.self_attn.k_proj.bias" for i in range(L)])
    with pytest.raises(UserError, match=r"missing: model\.layers\.\{0-2\}\.self_attn\.k_proj\.bias"):
        _load(directory)


def test_rotary_buffers_of_old_llama_checkpoints_are_passed_over(tmp_path):
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(H // 2, np.float32) for i in range(L)}
    directory, _ = _checkpoint(tmp_path / "a")
    with_buffers, _ = _checkpoint(tmp_path / "b", add=buffers)
    chex.assert_trees_all_equal(_load(with_buffers), _load(directory))


def test_a_name_with_and_without_prefix_is_refused(tmp_path):
    directory, _ = _checkpoint(tmp_path, "gpt2", add={"wte.weight": np.zeros((V, D), np.float32)})
    with pytest.raises(UserError, match=r"stored twice: .*wte\.weight"):
        _load(directory)


def test_a_tied_head_must_equal_the_embedding(tmp_path):
    config = config_for("llama", tie_word_embeddings=True)
    tensors = random_tensors(config)
    head = tensors["model.embed_tokens.weight"].copy()
    plain = _load(write(tmp_path / "plain", config, tensors))
    assert "head" not in plain
    chex.assert_trees_all_equal(_load(write(tmp_path / "same", config, tensors | {"lm_head.weight": head})), plain)
    head[V - 1, D - 1] += 1
    with pytest.raises(UserError, match=r"tie_word_embeddings is true.*lm_head\.weight differs"):
        _load(write(tmp_path / "other", config, tensors | {"lm_head.weight": head}))


def test_gpt2_is_tied_unless_it_says_otherwise(tmp_path):
    head = np.ones((V, D), np.float32)
    directory, _ = _checkpoint(tmp_path / "a", "gpt2", add={"lm_head.weight": head})
    with pytest.raises(UserError, match="differs"):
        _load(directory)
    directory, _ = _checkpoint(tmp_path / "b", "gpt2", add={"lm_head.weight": head}, tie_word_embeddings=False)
    np.testing.assert_array_equal(_load(directory)["head"]["w"], head)


def test_an_untied_model_without_its_head_is_refused(tmp_path):
    directory, _ = _checkpoint(tmp_path, drop=["lm_head.weight"])
    with pytest.raises(UserError, match=r"missing: lm_head\.weight"):
        _load(directory)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(tmp_path, dtype):
    name = "model.layers.0.mlp.up_proj.weight"
    directory, tensors = _checkpoint(tmp_path)
    save = load.safetensors.write
    tensors[name] = np.ones((F, D)).astype(dtype)
    infos = {name: load.TensorInfo(value.shape, value.dtype.name) for name, value in tensors.items()}
    save(directory / "model.safetensors", infos, tensors.__getitem__)
    with pytest.raises(UserError, match=r"no floating point.*up_proj"):
        _load(directory)


def test_a_shard_cut_short_is_refused_before_anything_is_read(tmp_path):
    directory, _ = _checkpoint(tmp_path, shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors: .*cut"):
        _load(directory)


def test_only_the_index_files_are_loaded(tmp_path):
    directory, stored = _checkpoint(tmp_path, shards=2)
    save_file({"foreign": np.zeros(1, np.float32)}, directory / "model.safetensors")
    np.testing.assert_array_equal(_load(directory)["embed"]["tokens"], stored["model.embed_tokens.weight"])
