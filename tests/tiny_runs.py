"""A random model of two layers on disk with a byte-level tokenizer, conversations for it, and runs of the command line."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from calyrex_jax.config import default_config
from calyrex_jax.core import trees
from calyrex_jax.weights.load import export_backbone
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ROWS = 272  # of the embedding: more than the tokenizer has entries
POSITIONS = 512


def byte_tokenizer() -> Tokenizer:
    """One token a byte, ids 0 … 255, then SPECIAL."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def write_model(directory: Path, seed: int = 0, change=lambda tree: tree, **changes) -> Path:
    """A random Llama as Hugging Face stores it, with tokenizer and chat template; `change` edits its weights."""
    small = {"vocab_size": ROWS, "num_hidden_layers": 2, "max_position_embeddings": POSITIONS}
    spec = tiny.spec("llama", **(small | changes))
    export_backbone(change(tiny.backbone(spec, seed)), spec, directory)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    return directory


def furnish(root: Path) -> Path:
    """root with model/ and chats.jsonl in it."""
    write_model(root / "model")
    write_corpus(root / "chats.jsonl")
    return root


def conversation(user: str, reply: str | None = None, system: str | None = None, **more) -> dict:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": user})
    if reply is not None:
        messages.append({"role": "assistant", "content": reply})
    return {"messages": messages, **more}


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_corpus(path: Path, count: int = 13, long: bool = False) -> Path:
    """Conversations of 65 to 96 tokens, one bucket, two thirds with a system text; `long` adds two of another bucket."""
    rows = []
    for i in range(count):
        system = None if i % 3 == 2 else f"Say the number {i}"
        filler = "" if system else " and nothing else at all, please"
        rows.append(conversation(f"Q{i}" + filler, f"{i}. " + "ab"[i % 2] * (i % 5), system))
    if long:
        rows += [conversation("a longer question " * 6, f"reply {i}", "Be brief") for i in range(2)]
    return write_jsonl(path, rows)


def make_config(model: Path, data: Path | str = "", **changes):
    """A short run; changes name fields as `train__steps=3`."""
    config = default_config()
    config.backbone.source, config.data.source = str(model), str(data)
    config.adapter.placement = "1,2"
    config.cal.mlp_dim = 16
    config.data.max_length = 256
    config.train.update({"steps": 10, "batch_size": 4, "learning_rate": 0.01, "log_every": 1, "save_every": 5})
    config.generate.update({"max_new_tokens": 6, "batch_size": 3})
    for field, value in changes.items():
        *groups, name = field.split("__")
        (config[groups[0]] if groups else config)[name] = value
    return config


def arguments(config, workdir: Path, mode: str = "train", **more) -> list[str]:
    """The command line that gives `config`, where it differs from the defaults."""
    plain, found = default_config(), [f"--config={ROOT / 'tests/plain_config.py'}"]  # which must come before its fields
    for name, value in config.items():
        if not isinstance(value, ConfigDict):
            found += [f"--config.{name}={value}"] if plain[name] != value else []
            continue
        found += [f"--config.{name}.{k}={v}" for k, v in value.items() if plain[name][k] != v]
    found += [f"--workdir={workdir}", f"--mode={mode}"]
    return found + [f"--{name}={value}" for name, value in more.items()]


def command(*args: str, first: str | None = None, timeout: float = 300, wait: bool = True, **environment):
    """`python -m calyrex_jax.main ARGS` in its own process; `first` is Python that runs before it, in the same process."""
    run = f"{first}\nimport sys\nfrom calyrex_jax import main\nsys.exit(main.main(sys.argv))"
    how = ["-m", "calyrex_jax.main"] if first is None else ["-c", run]
    settings = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": settings, "cwd": ROOT}
    if not wait:
        return subprocess.Popen([sys.executable, *how, *args], **pipes)
    return subprocess.run([sys.executable, *how, *args], timeout=timeout, check=False, **pipes)


def assert_one_error(done, *parts: str) -> None:
    """Exit status 2, and on standard error no traceback and a last line that begins with "error:" and holds `parts`."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, done.stderr
    assert done.stderr.splitlines()[-1] == errors[0]
    for part in parts:
        assert part in errors[0], errors[0]


def adapters(workdir: Path, step: int | None = None) -> dict[str, np.ndarray]:
    """{path: value} of the CAL adapter in the newest checkpoint, or the one of `step`."""
    return jax.tree.map(np.asarray, trees.flatten(all_adapters(workdir, step)["cal"]))


def all_adapters(workdir: Path, step: int | None = None) -> dict:
    """{name: tree} of every adapter in the newest checkpoint, or the one of `step`."""
    root = workdir / "checkpoints"
    newest = max(int(path.name) for path in root.iterdir() if path.name.isdigit()) if step is None else step
    with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
        items = sorted((root / str(newest)).glob("adapter_*"))
        return {path.name.removeprefix("adapter_"): reader.restore(path) for path in items}


def assert_same_adapters(first: Path, second: Path) -> None:
    a, b = adapters(first), adapters(second)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


def metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def losses(workdir: Path) -> list[float]:
    return [line["loss"] for line in metrics(workdir)]


def report(workdir: Path) -> dict:
    return json.loads((workdir / "report.json").read_text())


def kill_at(monkeypatch, step: int, number: int = signal.SIGTERM) -> None:
    """Sends this process a signal when a run logs `step`."""
    from calyrex_jax.metrics import Metrics

    log = Metrics.log

    def logged(self, at, values):
        log(self, at, values)
        if at == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Metrics, "log", logged)


def keep_compilations(directory: Path) -> dict[str, str]:
    """From now on programs are compiled once for this process and its children; the environment to start them with."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    return {name.upper(): str(value) for name, value in settings.items()}


def forget_compilations() -> None:
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
