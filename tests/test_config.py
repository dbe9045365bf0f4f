"""Every field is typed and known; what is wrong is named."""

import os

import pytest

from calyrex_jax.config import as_dict, check, default_config, prepare_workdir
from calyrex_jax.core.errors import UserError


def given(**changes):
    config = default_config()
    config.backbone.source = "somewhere"
    with config.unlocked(), config.ignore_type():
        for field, value in changes.items():
            group, name = field.split("__")
            config[group][name] = value
    return config


def test_the_defaults_lack_a_backbone_alone():
    check(given())
    with pytest.raises(UserError, match=r"config\.backbone\.source is empty"):
        check(default_config())


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("train__steps", "10", "config.train.steps is '10', expected int"),
        ("train__steps", True, "config.train.steps is True, expected int"),
        ("train__steps", 10.0, "config.train.steps is 10.0, expected int"),
        ("train__steps", 0, "config.train.steps is 0; expected at least 1"),
        ("train__steps", -3, "config.train.steps is -3; expected at least 1"),
        ("train__batch_size", 0, "config.train.batch_size is 0"),
        ("train__learning_rate", "1e-5", "config.train.learning_rate is '1e-5', expected float"),
        ("train__learning_rate", None, "config.train.learning_rate is None, expected float"),
        ("data__packing", 1, "config.data.packing is 1, expected bool"),
        ("data__prefix_cache", "float16", "config.data.prefix_cache is 'float16'; known: off, float32, bfloat16"),
        ("data__max_length", 0, "config.data.max_length is 0"),
        ("backbone__dtype", "float8", "config.backbone.dtype is 'float8'; known: float32, bfloat16"),
        ("chat__system_role", "drop", "config.chat.system_role is 'drop'; known: error, merge"),
        ("generate__max_new_tokens", 0, "config.generate.max_new_tokens is 0"),
        ("generate__top_k", 2.5, "config.generate.top_k is 2.5, expected int"),
        ("train__accumulate", 3, "config.train.batch_size=8 does not split into config.train.accumulate=3"),
        ("train__no_such_field", 1, "config.train.no_such_field is not a field; known here: accumulate"),
        ("mesh__data", "all", "config.mesh.data is 'all', expected int"),
    ],
)
def test_a_bad_value_is_named_with_what_was_expected(field, value, said):
    with pytest.raises(UserError) as caught:
        check(given(**{field: value}))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_whole_numbers_are_fine_where_a_float_is_expected():
    check(given(train__learning_rate=1, generate__temperature=0))


def test_groups_and_missing_fields():
    config = given()
    with config.unlocked(), config.ignore_type():
        config.cal = 3
    with pytest.raises(UserError, match=r"config\.cal is 3, expected a group of fields"):
        check(config)
    config = given()
    with config.unlocked():
        del config.train.seed
    with pytest.raises(UserError, match=r"config\.train\.seed is missing"):
        check(config)
    config = given()
    with config.unlocked():
        config.extra = 1
    with pytest.raises(UserError, match=r"config\.extra is not a field"):
        check(config)


def test_as_dict_is_plain_and_whole():
    config = given(train__steps=7)
    plain = as_dict(config)
    assert type(plain) is dict and type(plain["train"]) is dict
    assert plain["train"]["steps"] == 7
    assert {group: set(fields) for group, fields in plain.items()} == {g: set(f) for g, f in default_config().items()}


def test_the_workdir_is_made_and_left_empty(tmp_path):
    made = prepare_workdir(str(tmp_path / "a" / "b"))
    assert made == (tmp_path / "a" / "b").resolve()
    assert list(made.iterdir()) == []


def test_a_workdir_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="--workdir is missing"):
        prepare_workdir("")
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match=r"--workdir=.*cannot be written"):
            prepare_workdir(str(place))
    with pytest.raises(UserError, match=r"--workdir=gs://bucket/run: .*mount the bucket"):
        prepare_workdir("gs://bucket/run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_workdir(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"--workdir=.*cannot be written \(Permission denied\)"):
        prepare_workdir(str(tmp_path))
