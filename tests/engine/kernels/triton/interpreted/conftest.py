"""These tests have a process of their own, which ../test_interpreter.py starts; any other one leaves them out.

TRITON_INTERPRET is looked at when triton is imported: then its own functions and all kernels become what the interpreter runs, for as long
as the process lives. In one process with others these tests would find triton imported already, or would make the tests that compile
find kernels that cannot be compiled. To run some of them by hand:

    TRITON_INTERPRET=1 python -m pytest tests/engine/kernels/triton/interpreted -k windows
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def quiet_numpy() -> Iterator[None]:
    """Infinities and numbers that are none belong to what is computed; a GPU says nothing about them either."""
    with np.errstate(all="ignore"):
        yield
