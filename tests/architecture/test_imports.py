"""What a process needs to have installed: import-linter holds the floors, these hold what is below them."""

import subprocess
import sys

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
