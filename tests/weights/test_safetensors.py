import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights import safetensors
from calyrex_jax.weights.reader import TensorInfo
from tests.weights.checkpoints import BF16

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(4, 3),
    "b": np.arange(6).astype(BF16).reshape(3, 2),
    "c": np.array([1.5, -2.0], np.float16),
    "mask": np.tri(3, dtype=np.bool_),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_reads_what_the_library_wrote(file):
    reader = safetensors.SafetensorsReader([file])
    assert reader.names()["b"] == TensorInfo((3, 2), "bfloat16")
    for name, value in TENSORS.items():
        np.testing.assert_array_equal(reader.rows(name, 0, len(value)), value)
    np.testing.assert_array_equal(reader.rows("a", 1, 3), TENSORS["a"][1:3])


def test_the_library_reads_what_was_written(tmp_path):
    infos = {name: TensorInfo(value.shape, value.dtype.name) for name, value in TENSORS.items()}
    safetensors.write(tmp_path / "out.safetensors", infos, TENSORS.__getitem__)
    back = load_file(tmp_path / "out.safetensors")
    assert back.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        assert back[name].dtype == value.dtype
        np.testing.assert_array_equal(back[name], value)
    assert [path.name for path in tmp_path.iterdir()] == ["out.safetensors"]


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_a_cut_file_is_refused(file, keep):
    content = file.read_bytes()
    file.write_bytes(content[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors: .*(cut|header)"):
        safetensors.SafetensorsReader([file])


def test_trailing_bytes_are_refused(file):
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(UserError, match="header announces"):
        safetensors.SafetensorsReader([file])


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04 this is a zip file in truth", b"\x10" + b"\0" * 7 + b"{}" * 8, b"\x02" + b"\0" * 7 + b"[]"]
)
def test_a_foreign_file_is_refused(file, content):
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        safetensors.SafetensorsReader([file])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
        {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]},
    ],
)
def test_a_broken_entry_is_refused(file, entry):
    text = json.dumps({"a": entry}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        safetensors.SafetensorsReader([file])


def test_a_tensor_in_two_files_is_refused(file, tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "other.safetensors")
    with pytest.raises(UserError, match=r"a is in model\.safetensors too"):
        safetensors.SafetensorsReader([file, tmp_path / "other.safetensors"])


def test_an_index_that_disagrees_is_refused(file):
    right = dict.fromkeys(TENSORS, file.name)
    assert safetensors.SafetensorsReader([file], right).names().keys() == TENSORS.keys()
    with pytest.raises(UserError, match=r"gone not in model\.safetensors"):
        safetensors.SafetensorsReader([file], right | {"gone": file.name})
    del right["a"]
    with pytest.raises(UserError, match=r"a in model\.safetensors but not in the index"):
        safetensors.SafetensorsReader([file], right)


def test_a_failed_write_leaves_nothing(tmp_path):
    def full_disk(name):
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left on device"):
        safetensors.write(tmp_path / "out.safetensors", {"a": TensorInfo((1,), "float32")}, full_disk)
    assert list(tmp_path.iterdir()) == []
