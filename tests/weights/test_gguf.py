import chex
import gguf
import gguf.quants
import ml_dtypes
import numpy as np
import pytest

from calyrex_jax.backbones.spec import DecoderSpec
from calyrex_jax.core.errors import UserError
from calyrex_jax.weights import gguf as reading
from calyrex_jax.weights.load import load_backbone
from calyrex_jax.weights.sources import resolve
from tests.weights.checkpoints import D, K, V, config_for, random_tensors, write
from tests.weights.gguf_files import write_gguf

QUANTISED = sorted(
    name
    for name, kind in gguf.GGMLQuantizationType.__members__.items()
    if hasattr(getattr(gguf.quants, name, None), "qtype")
)


def _load(source, dtype="float32"):
    return load_backbone(source, DecoderSpec.from_config(source.config), dtype)


def test_every_type_of_the_package_is_covered():
    assert {"Q4_0", "Q4_1", "Q5_K", "Q8_0", "IQ2_XXS", "IQ4_XS", "TQ1_0", "BF16"} <= set(QUANTISED)


@pytest.mark.parametrize("name", QUANTISED)
def test_rows_are_dequantised_as_the_package_does(tmp_path, name):
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    stored = np.random.default_rng(0).integers(0, 256, (5, 2 * size * max(1, 32 // block)), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("x", stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    expected = gguf.dequantize(stored, kind)
    reader = reading.GGUFReader(tmp_path / "a.gguf")
    assert reader.names()["x"].shape == expected.shape
    for start, stop in ((0, 5), (2, 4)):
        got = reader.rows("x", start, stop).astype(np.float32)
        np.testing.assert_array_equal(got.view(np.uint32), expected[start:stop].view(np.uint32))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2"])
def test_a_gguf_file_gives_the_tree_of_the_checkpoint_it_was_made_of(tmp_path, architecture):
    changes = {"attention_bias": True, "mlp_bias": True} if architecture == "llama" else {}
    config = config_for(architecture, **changes)
    tensors = random_tensors(config)
    expected = _load(resolve(str(write(tmp_path / "hf", config, tensors))))
    source = resolve(str(write_gguf(tmp_path / "a.gguf", architecture, tensors)))
    assert source.config["tie_word_embeddings"] == (architecture == "gpt2")
    chex.assert_trees_all_equal(_load(source), expected)


def test_an_untied_gpt2_keeps_its_head(tmp_path):
    head = np.arange(V * D, dtype=np.float32).reshape(V, D)
    source = resolve(str(write_gguf(tmp_path / "a.gguf", "gpt2", extra={"output.weight": head})))
    np.testing.assert_array_equal(_load(source)["head"]["w"], head)


def test_a_left_over_tensor_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "qwen2", extra={"blk.0.attn_q_norm.weight": np.ones(4, np.float32)})
    with pytest.raises(UserError, match=r"unexpected: blk\.0\.attn_q_norm\.weight"):
        _load(resolve(str(path)))


def test_integer_tensors_are_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "qwen2", extra={"blk.0.x": np.ones(4, np.int32)})
    with pytest.raises(UserError, match="type I32 cannot be dequantised"):
        resolve(str(path))


def test_plain_types_come_in_their_own_type(tmp_path):
    extra = {"f16": np.ones((2, 2), np.float16), "f64": np.ones((2, 2), np.float64)}
    reader = reading.GGUFReader(write_gguf(tmp_path / "a.gguf", "llama", extra=extra))
    for name, value in extra.items():
        assert reader.names()[name].dtype == value.dtype.name == reader.rows(name, 0, 1).dtype.name


def test_bfloat16_is_exact(tmp_path):
    tensors = random_tensors(config_for("llama"), ml_dtypes.bfloat16)
    path = write_gguf(
        tmp_path / "a.gguf",
        "llama",
        {name: value.astype(np.float32) for name, value in tensors.items()},
        qtype=gguf.GGMLQuantizationType.BF16,
    )
    got = _load(resolve(str(path)), "bfloat16")
    np.testing.assert_array_equal(got["embed"]["tokens"], tensors["model.embed_tokens.weight"])
    expected = tensors["model.layers.1.self_attn.k_proj.weight"].T.reshape(D, K, -1)
    np.testing.assert_array_equal(got["layers"]["attn"]["w_k"][1], expected)


def test_fields_are_those_of_the_package(tmp_path):
    words = ["a", "ä", "", "日本"]
    fields = {"tokenizer.ggml.tokens": words, "tokenizer.ggml.scores": [0.5, -1.0], "x.flag": True, "x.text": "ünï"}
    path = write_gguf(tmp_path / "a.gguf", "llama", fields=fields)
    got = reading.read_header(path).fields
    for name, field in gguf.GGUFReader(path).fields.items():
        if not name.startswith("GGUF."):
            np.testing.assert_array_equal(got[name], field.contents(), err_msg=name)
    assert got["tokenizer.ggml.tokens"] == words


def test_a_header_longer_than_the_first_read(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "a.gguf", "llama", fields={"tokenizer.ggml.tokens": ["word"] * 100})
    whole = reading.read_header(path)
    monkeypatch.setattr(reading, "_FIRST_READ", 64)
    assert reading.read_header(path).tensors == whole.tensors


def test_a_cut_file_is_refused(tmp_path):
    content = write_gguf(tmp_path / "a.gguf", "llama").read_bytes()
    for keep in (0, 3, 4, 20, 30, 200, 900, len(content) // 2, len(content) - 40):
        (tmp_path / "cut.gguf").write_bytes(content[:keep])
        with pytest.raises(UserError, match=r"cut\.gguf: (ends|not a GGUF)"):
            reading.read_header(tmp_path / "cut.gguf")


def test_damaged_headers_are_refused(tmp_path):
    content = bytearray(write_gguf(tmp_path / "a.gguf", "llama").read_bytes())

    def damaged(position, value):
        changed = content.copy()
        changed[position : position + len(value)] = value
        (tmp_path / "bad.gguf").write_bytes(changed)
        return tmp_path / "bad.gguf"

    with pytest.raises(UserError, match="version 9"):
        reading.read_header(damaged(4, b"\x09"))
    with pytest.raises(UserError, match="ends within its header"):
        reading.read_header(damaged(16, b"\xff\xff\xff\xff"))  # more fields than there are
    with pytest.raises(UserError, match="the header is damaged"):
        reading.read_header(damaged(32, b"\xff\xfe"))  # the first field's name is no UTF-8
    name = content.index(b"token_embd.weight")
    with pytest.raises(UserError, match="unknown type number"):
        reading.read_header(damaged(name + 17 + 4 + 16, b"\xc8"))
    with pytest.raises(UserError, match="reaches byte"):
        reading.read_header(damaged(name + 17 + 4 + 16 + 4, b"\0\0\0\x7f"))


def test_a_split_file_is_refused(tmp_path):
    path = write_gguf(tmp_path / "a.gguf", "llama", fields={"split.count": 2})
    with pytest.raises(UserError, match="llama-gguf-split --merge"):
        resolve(str(path))
