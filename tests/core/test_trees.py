import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calyrex_jax.core import trees

TREE = {"b": {"w": np.zeros((2, 3), np.float32), "a": np.ones(4, np.float32)}, "a": np.arange(5, dtype=np.int32)}


def test_flatten_and_back():
    flat = trees.flatten(TREE)
    assert list(flat) == ["a", "b/a", "b/w"]
    assert flat["b/w"] is TREE["b"]["w"]
    back = trees.unflatten(flat)
    assert jax.tree.structure(back) == jax.tree.structure(TREE)
    assert back["b"]["a"] is TREE["b"]["a"]


def test_flatten_names_list_entries_by_index():
    assert trees.flatten({"a": [1, 2]}) == {"a/0": 1, "a/1": 2}


def test_map_with_path():
    assert trees.map_with_path(lambda path, leaf: f"{path}:{leaf.ndim}", TREE) == {
        "a": "a:1",
        "b": {"a": "b/a:1", "w": "b/w:2"},
    }


def test_count_and_bytes_take_shapes_alone():
    tree = {"x": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "y": jax.ShapeDtypeStruct((), jnp.float32)}
    assert trees.count(tree) == 13
    assert trees.num_bytes(tree) == 28
    assert trees.count({}) == 0


def test_match_lists_every_difference():
    got = {"b": {"w": np.zeros((3, 2)), "new": np.zeros(1)}, "a": TREE["a"]}
    assert trees.match(TREE, got, "it") == [
        "it lacks b/a",
        "it has unexpected b/new",
        "it: b/w has shape (3, 2), expected (2, 3)",
    ]
    assert trees.match(TREE, jax.tree.map(jnp.asarray, TREE), "it") == []


def test_checksum_sees_every_bit_name_type_and_shape():
    base = trees.checksum(TREE)
    assert base == trees.checksum(jax.tree.map(jnp.asarray, TREE))  # wherever the leaf lies
    changed = [
        {**TREE, "a": TREE["a"] + 1},
        {**TREE, "a": TREE["a"].astype(np.int64)},
        {"b": TREE["b"], "c": TREE["a"]},
        {**TREE, "a": TREE["a"].reshape(5, 1)},
        {**TREE, "b": {**TREE["b"], "w": np.full((2, 3), -0.0, np.float32)}},
    ]
    assert len({base, *map(trees.checksum, changed)}) == len(changed) + 1
    assert trees.checksum(TREE, ["a"]) == trees.checksum({"a": TREE["a"]})


def test_checksum_is_sha256_of_what_it_says():
    value = np.array([1.5], np.float32)
    assert trees.checksum({"x": value}) == hashlib.sha256(b"x:float32:(1,)" + value.tobytes()).hexdigest()


def test_unflatten_refuses_nothing_it_can_build():
    assert trees.unflatten({}) == {}
    with pytest.raises(TypeError):
        trees.unflatten({"a": 1, "a/b": 2})
