"""Who has no triton, or no GPU, notices nothing of these kernels."""

import subprocess
import sys

from tests.architecture.documents import ROOT

_SERVICES = "import prefill_service.__main__, decode_service.__main__, router.__main__"
_BLOCK = "import sys; sys.modules['triton'] = None; "
_KERNELS = "import paceline.engine.kernels.triton.paged_decode"


def test_no_service_imports_triton() -> None:
    """Whether it is installed or not: it takes a second to import, and what it could run is not there."""
    done = _python(f"{_SERVICES}; import sys; print('triton' in sys.modules)")
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr


def test_services_start_without_it() -> None:
    """And the kernels do not, so that the block is one."""
    assert _python(_BLOCK + _SERVICES).returncode == 0
    assert "ModuleNotFoundError" in _python(_BLOCK + _KERNELS).stderr


def _python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
