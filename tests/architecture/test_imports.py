"""What a process needs to have installed: import-linter holds the floors, these hold what is below them."""

import subprocess
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import packages_distributions, requires

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.documents import ROOT

# Makes the import of a forbidden package fail, as if it were not installed.
_BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if is_blocked(name.partition(".")[0]):
            raise ModuleNotFoundError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
"""
_NO_TORCH = "is_blocked = {'torch', 'numpy', 'xxhash', 'accelerate'}.__contains__\n"
# What grpc loads where it finds it, and does without where it does not, is blocked too.
_CLIENT_ONLY = (
    "import sys\n"
    "allowed = {'paceline', 'grpc', 'google', 'typing_extensions'} | sys.stdlib_module_names\n"
    "is_blocked = lambda name: name not in allowed\n"
)


def test_the_router_runs_without_torch() -> None:
    """Everything that the router imports at start is there without torch and the other packages of a worker."""
    assert _imports(_NO_TORCH, "router.__main__, router.server, router.tokenizer") == ""


def test_a_worker_does_not() -> None:
    """The same block stops what computes, so the test above can fail."""
    assert "torch is blocked" in _imports(_NO_TORCH, "paceline.engine.model_runner")


def test_the_client_needs_grpcio_and_protobuf_only() -> None:
    """The Python client is imported where nothing else of ours, or of anybody, is installed."""
    assert _imports(_CLIENT_ONLY, "paceline.client, paceline.client_error") == ""


def test_the_router_needs_more() -> None:
    """The same block stops the router, so the test above can fail."""
    assert "is blocked" in _imports(_CLIENT_ONLY, "router.server")


def _imports(blocked: str, modules: str) -> str:
    """What Python says when it imports `modules` without what is blocked; nothing when all goes well."""
    code = f"{blocked}{_BLOCKER}\nimport {modules}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stderr


@pytest.mark.parametrize(
    ("extra", "modules"),
    [
        ("router", "router.__main__, router.make_key, paceline.health, paceline.cli"),
        ("worker", "prefill_service.__main__, decode_service.__main__, paceline.health"),
    ],
)
def test_an_extra_installs_what_its_programs_import(extra: str, modules: str) -> None:
    """Each program starts where nothing is installed but its extra: what another one brings is not there."""
    assert _imports(_without_others(extra), modules) == ""


def test_what_an_extra_lacks_is_noticed() -> None:
    """The same question fails for a worker where only the router is installed."""
    assert "is blocked" in _imports(_without_others("router"), "paceline.engine.model_runner")


def _without_others(extra: str) -> str:
    """Blocks what is installed here and would not be by this extra alone."""
    brought = _installed_by(extra) | {"paceline"}
    absent = {top for top, owners in _owners().items() if not {*map(canonicalize_name, owners)} & brought}
    return f"is_blocked = {sorted(absent)!r}.__contains__\n"


def _installed_by(extra: str) -> set[str]:
    """The distributions that `pip install .[extra]` brings, by the requirements that each of them states."""
    found: set[str] = set()
    todo = [Requirement(f"paceline[{extra}]")]
    while todo:
        requirement = todo.pop()
        extras = {"", *requirement.extras}
        for text in _requirements_of(requirement.name):
            each = Requirement(text)
            wanted = each.marker is None or any(each.marker.evaluate({"extra": name}) for name in extras)
            if wanted and (canonicalize_name(each.name) not in found or each.extras):
                found.add(canonicalize_name(each.name))
                todo.append(each)
    return found


def _requirements_of(name: str) -> list[str]:
    if name != "paceline":
        return requires(name) or []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    return [
        *project["dependencies"],
        *(f'{each}; extra == "{extra}"' for extra, listed in extras for each in listed),
    ]


@cache
def _owners() -> Mapping[str, list[str]]:
    """Which distributions have a top-level module; it reads the lists of files of all of them."""
    return packages_distributions()
