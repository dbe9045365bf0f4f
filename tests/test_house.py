"""The house rules that a reader can check: import arrows, sizes, configs, and what no file may name."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from calyrex_jax.core.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "calyrex_jax"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# from top to bottom: a room imports rooms of the rows below it; within a row only without a circle, and in the row of
# the parts not at all
ROWS = (
    ("main",),
    (
        "train",
        "plan",
        "bench",
        "bench_svgt",
        "bench_torch",
        "infer",
        "evaluate",
        "ablate",
        "analyze",
        "curriculum",
        "fit",
        "judged_texts",
        "prepare",
        "bench_data",
    ),
    ("build", "makers", "arms", "config"),
    ("training", "planning", "evals", "analysis", "checkpoint", "metrics"),
    ("model", "generate", "guidance"),
    ("weights", "adapters", "backbones", "data", "sharding"),
    ("core",),
)
ROW = {room: i for i, row in enumerate(ROWS) for room in row}
PARTS = ROWS[-2]
# the one look sideways: weights reads how a backbone is built and what its tree looks like
SIDEWAYS = {
    ("weights", "calyrex_jax.backbones.spec"),
    ("weights", "calyrex_jax.backbones.spec.*"),
    ("weights", "calyrex_jax.backbones.decoder.abstract_params"),
}
# where a ConfigDict may be seen
BUILDERS = {
    "main",
    "train",
    "plan",
    "bench",
    "infer",
    "evaluate",
    "ablate",
    "arms",
    "analyze",
    "curriculum",
    "fit",
    "judged_texts",
    "build",
    "makers",
    "config",
}
# slow or absent: only inside functions, or for type checkers
LAZY = {"torch", "peft", "tensorflow", "matplotlib", "tensorflow_datasets"}


def room_of(path: Path) -> str:
    """The room of a file of the package: its top folder, or its own name."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports(source: str) -> Iterator[tuple[str, bool]]:
    """Every imported name in full, `a.b.c` for `from a.b import c`, and whether the import runs with the module."""

    def visit(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = "." * child.level + (child.module or "")
                yield from ((f"{base}.{alias.name}", eager) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from visit(child, False)
            else:
                yield from visit(child, eager and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda))

    yield from visit(ast.parse(source), True)


def faults(room: str, source: str) -> list[str]:
    """What a file of `room` imports against the rules."""
    found = []
    for name, eager in imports(source):
        top, _, rest = name.partition(".")
        if name.startswith("."):
            found.append(f"relative import {name}")
        elif top == "ml_collections" and room not in BUILDERS:
            found.append(f"{name} below the builders")
        elif top in LAZY and eager:
            found.append(f"{name} at module level")
        elif top in ("tests", "configs"):
            found.append(f"{name} from the package")
        elif top == "calyrex_jax" and rest:
            other = rest.partition(".")[0]
            if other in ("__version__", room):
                continue
            if other not in ROW:
                found.append(f"{name}: {other} is in no row of tests/test_house.py")
            elif ROW[other] < ROW[room]:
                found.append(f"{name} points up from {room}")
            elif room in PARTS and other in PARTS and not any(room == r and fnmatch(name, p) for r, p in SIDEWAYS):
                found.append(f"{name} points sideways from {room}")
    return found


@pytest.mark.parametrize(
    ("room", "source", "fault"),
    [
        ("core", "from calyrex_jax.data import chat", "points up"),
        ("backbones", "from calyrex_jax.adapters.cal import Cal", "points sideways"),
        ("adapters", "def f():\n    import calyrex_jax.backbones.spec", "points sideways"),
        (
            "adapters",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from calyrex_jax import backbones",
            "points sideways",
        ),
        ("weights", "from calyrex_jax.data.tokenizer import Tokenizer", "points sideways"),
        ("weights", "from calyrex_jax.backbones.decoder import embed", "points sideways"),
        ("generate", "from calyrex_jax.training import step", "points up"),
        ("training", "from calyrex_jax import train", "points up"),
        ("model", "from ..core import types", "relative import"),
        ("model", "from calyrex_jax import nowhere", "in no row"),
        ("training", "from ml_collections import ConfigDict", "below the builders"),
        ("bench", "import torch", "at module level"),
        ("data", "class A:\n    import tensorflow_datasets as tfds", "at module level"),
        ("weights", "from calyrex_jax.backbones.spec import DecoderSpec", None),
        ("weights", "from calyrex_jax.backbones.decoder import abstract_params", None),
        ("main", "from calyrex_jax import train", None),
        ("train", "from ml_collections import ConfigDict", None),
        ("bench", "def f():\n    import torch", None),
        ("generate", "from calyrex_jax.model import Model\nfrom calyrex_jax import __version__", None),
    ],
)
def test_the_checker_sees_faults(room, source, fault):
    found = faults(room, source)
    assert len(found) == (fault is not None), found
    assert fault is None or fault in found[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    if path.parent == PACKAGE and path.name == "__init__.py":
        assert [name for name, _ in imports(path.read_text()) if name.startswith("calyrex_jax")] == []
    else:
        assert faults(room_of(path), path.read_text()) == []


def test_rooms_import_each_other_without_a_circle():
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        room = room_of(path)
        names = (name.split(".") for name, _ in imports(path.read_text()) if name.startswith("calyrex_jax."))
        graph.setdefault(room, set()).update(name[1] for name in names if name[1] != room)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"rooms in a circle: {error.args[1]}")


PYTHON = [*SOURCES, *sorted((ROOT / "configs").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py")), ROOT / "setup.py"]


def test_files_are_short():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in PYTHON}
    assert {name: n for name, n in lengths.items() if n > 440} == {}
    assert lengths.get("calyrex_jax/main.py", 0) < 80


def test_functions_are_short():
    """About 50 lines without the docstring; the training loop and the table of fields are read from top to bottom."""
    long = {}
    for path in SOURCES:
        limit = 120 if room_of(path) in ("train", "config") else 65
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                if body and (n := body[-1].end_lineno - body[0].lineno + 1) > limit:
                    long[f"{path.relative_to(ROOT)}:{node.name}"] = n
    assert long == {}


def test_modules_and_public_names_have_docstrings():
    bare = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        if path.name != "__init__.py" and not ast.get_docstring(tree):
            bare.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                bare.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert not bare, "\n".join(bare)


# in parts, so that this file does not name what it looks for
UNWANTED = re.compile(
    "|".join(
        (
            r"\.\./sha" + "red",
            "sha" + "red/(design|data|prior_art)",
            r"(?<![\w.~}])/" + r"((work|opt|root|Users|mnt)/|home/(?!someone\b))\w",
            r"\bTO" + r"DO\b",
            r"\bFIX" + r"ME\b",
        )
    )
)
TEXT = {".py", ".sh", ".md", ".toml", ".json", ".jsonl", ".svg", ".yaml", ".yml", ".mjs", ".js", ".txt", ".cfg", ""}
TOP_LEVEL = {
    "setup.py",
    "README.md",
    "BUILD_NOTES.md",
    "LICENSE",
    "pyproject.toml",
    "calyrex_jax",
    "configs",
    "launch",
    "tests",
}


def committed_texts() -> list[Path]:
    """Text files under the fixed top-level names."""
    tops = [ROOT / name for name in (*TOP_LEVEL, ".ci", ".github", ".gitignore")]
    files = [path for top in tops for path in (top.rglob("*") if top.is_dir() else [top])]
    return [path for path in files if path.is_file() and path.suffix in TEXT and "__pycache__" not in path.parts]


def test_unwanted_is_recognised():
    for text in (
        "see ../sha" + "red/x",
        "sha" + "red/design",
        "/wo" + "rk/main",
        "open('/ho" + "me/me/x')",
        "# T" + "ODO later",
    ):
        assert UNWANTED.search(text), text
    for text in (
        "docs/home/me",
        "~/work/x",
        "$HOME/root/x",
        "/working/x",
        "/home/someone/x",
        "shared prefix",
        "/tmp/run",
        "hf:OWNER/home/x",
    ):
        assert not UNWANTED.search(text), text


def test_nothing_names_a_machine_or_leaves_work_undone():
    found = []
    for path in committed_texts():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if UNWANTED.search(line) and "owner:" not in line:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


CONFIGS = sorted((ROOT / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_load_and_say_how_they_are_run(path):
    from calyrex_jax.config import check

    module_spec = importlib.util.spec_from_file_location(f"configs_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    assert f"--config=configs/{path.name}" in (module.__doc__ or ""), "the docstring gives the command"
    config = module.get_config()
    check(config)
    with config.unlocked():
        config.no_such_field = 1
    with pytest.raises(UserError, match="no_such_field"):
        check(config)


def test_data_files_are_packaged():
    """What is not a module must match setup.py's package_data, or an installed package lacks it."""
    others = [p for p in PACKAGE.rglob("*") if p.is_file() and p.suffix != ".py" and "__pycache__" not in p.parts]
    missing = [str(p.relative_to(ROOT)) for p in others if p.suffix not in (".json", ".jsonl")]
    assert not missing, "\n".join(missing)
    folders = {p.parent for p in SOURCES}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


def test_top_level_names():
    names = {p.name for p in ROOT.iterdir() if not p.name.startswith(".")}
    built = {"build", "dist", "runs", "calyrex_jax.egg-info"}
    assert names - TOP_LEVEL - built == set()
