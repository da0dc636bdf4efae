"""The names that the code has: those of its Python files, read without importing them, and those of its protos."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FileDescriptor

from paceline.core import errors
from paceline.runtime import metrics
from paceline.v1 import (
    decode_pb2,
    engine_pb2,
    generation_pb2,
    inference_pb2,
    kv_transfer_pb2,
    prefill_pb2,
    worker_pb2,
)
from tests.architecture.documents import ROOT

_PROTOS = (decode_pb2, engine_pb2, generation_pb2, inference_pb2, kv_transfer_pb2, prefill_pb2, worker_pb2)
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_LOG_CALLS = frozenset(f"log.{level}" for level in ("debug", "info", "warning", "error", "exception"))


def package_files() -> list[Path]:
    """The Python files of our packages, generated ones left out."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    files = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    return sorted(path for path in files if ROOT / "paceline" / "v1" not in path.parents)


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_in(path: Path) -> frozenset[str]:
    """`function`, `CONSTANT`, `Class`, and `Class.member` for methods, fields and what `self` is given."""
    return frozenset(_names(tree_of(path).body))


@cache
def vocabulary() -> frozenset[str]:
    """Every name that a document may cite: of code (whole, or the last part), module, log event or error reason.

    The hand-over's tests are a specification, and so documents cite them too.
    """
    cited = [*package_files(), *(ROOT / "tests" / "kvtransfer").rglob("*.py")]
    names = {name for path in cited for name in names_in(path)} | set(_proto_names())
    parameters = {name for path in package_files() for name in _parameters(tree_of(path))}
    modules = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in package_files()
    }
    last_parts = {name.rpartition(".")[2] for name in names}
    others = log_events() | _reasons() | {metric.name for metric in all_metrics()} | _compose_variables()
    return frozenset(names | last_parts | parameters | modules | others)


@cache
def log_events() -> frozenset[str]:
    """What the code logs: the names of its events."""
    calls = [
        node for path in package_files() for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)
    ]
    logged = [call.args[0] for call in calls if ast.unparse(call.func) in _LOG_CALLS]
    assert all(isinstance(event, ast.Constant) for event in logged), "an event's name is written out"
    return frozenset(str(event.value) for event in logged if isinstance(event, ast.Constant))


def all_metrics() -> list[metrics.Metric]:
    """Every metric that the code names."""
    return [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]


def _reasons() -> frozenset[str]:
    return frozenset(
        error.reason
        for error in vars(errors).values()
        if isinstance(error, type) and issubclass(error, errors.PacelineError)
    )


def _compose_variables() -> frozenset[str]:
    """What a user of compose/ can choose."""
    example = (ROOT / "compose" / ".env.example").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^(\w+)=", example, re.MULTILINE))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
            yield from (f"{node.name}.{name}" for name in _names(node.body))
            yield from (f"{node.name}.{name}" for name in _given_to_self(node))
        elif isinstance(node, _Function):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def _given_to_self(cls: ast.ClassDef) -> Iterator[str]:
    for node in ast.walk(cls):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _parameters(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, _Function):
            yield from (argument.arg for argument in (*node.args.args, *node.args.kwonlyargs))


def _proto_names() -> Iterator[str]:
    for module in _PROTOS:
        file: FileDescriptor = module.DESCRIPTOR
        for service in file.services_by_name.values():
            yield from (service.name, service.full_name)
            yield from (f"{service.name}.{method.name}" for method in service.methods)
        for enum in file.enum_types_by_name.values():
            yield enum.name
            yield from (value.name for value in enum.values)
        for message in file.message_types_by_name.values():
            yield from _message_names(message)


def _message_names(message: Descriptor) -> Iterator[str]:
    yield message.name
    yield from (f"{message.name}.{field.name}" for field in message.fields)
