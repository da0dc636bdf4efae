"""Nothing of ours reads or writes what can run code when it is read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.documents import ROOT
from tests.architecture.names import package_files

# Modules whose formats can hold code, and those that wrap them.
MODULES = frozenset(
    {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
)
# Functions that take code, or that may.
CALLS = frozenset(
    {
        "eval",
        "exec",
        "torch.load",
        "torch.save",
        "torch.jit.load",
        "torch.hub.load",
        "numpy.load",
        "np.load",
        "numpy.fromfile",
        "pandas.read_pickle",
        "yaml.load",
        "yaml.unsafe_load",
    }
)
# What lets others load them.
OPTIONS = frozenset({"allow_pickle", "trust_remote_code", "weights_only"})
SAMPLES = (
    "import pickle",
    "import marshal as m",
    "from shelve import open",
    "from multiprocessing.reduction import ForkingPickler",
    "__import__('pickle')",
    "importlib.import_module('dill')",
    "torch.load(file)",
    "torch.load(file, weights_only=False)",
    "np.load(file, allow_pickle=True)",
    "AutoModel.from_pretrained(name, trust_remote_code=True)",
    "eval(text)",
    "exec(text)",
)
FINE = (
    "import json",
    "model.eval()",
    "json.load(file)",
    "AutoModel.from_pretrained(name, trust_remote_code=False)",
    "from transformers import AutoConfig",
)


def unsafe(tree: ast.AST) -> Iterator[str]:
    """What in a file could run code that it is given."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if _is_unsafe(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            yield from (name for name in names if _is_unsafe(name))
        elif isinstance(node, ast.Call):
            yield from _unsafe_call(node)


def _is_unsafe(name: str) -> bool:
    return bool(MODULES & set(name.split("."))) or "pickle" in name.lower()


def _unsafe_call(call: ast.Call) -> Iterator[str]:
    called = ast.unparse(call.func)
    if called in CALLS:
        yield called
    for option in call.keywords:
        safe = isinstance(option.value, ast.Constant) and option.value.value is False
        if option.arg in OPTIONS and not (safe and option.arg != "weights_only"):
            yield f"{called}({option.arg}=...)"
    if called in {"__import__", "importlib.import_module"}:
        named = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
        yield from (str(name) for name in named if _is_unsafe(str(name)))


def test_no_file_of_ours_can_run_what_it_reads() -> None:
    """Not the packages, and not the examples; no pickle, no code out of a model, no eval."""
    files = [*package_files(), *sorted((ROOT / "examples").rglob("*.py"))]
    assert len(files) > 200
    assert [f"{path.relative_to(ROOT)}: {found}" for path in files for found in unsafe(_tree(path))] == []


@pytest.mark.parametrize("code", SAMPLES)
def test_what_could_run_code_is_found(code: str) -> None:
    """Each way of writing it."""
    assert list(unsafe(ast.parse(code)))


@pytest.mark.parametrize("code", FINE)
def test_what_could_not_is_left_alone(code: str) -> None:
    """A name that only looks like it."""
    assert not list(unsafe(ast.parse(code)))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))
