"""The checks of `./run bench gpu`, in the interpreter: they pass, and see what is wrong."""

import torch

from benchmarks.gpu_checks import Check, run_checks
from paceline.engine.device import HOST


def test_all_kernels_pass() -> None:
    """In float32; on a GPU it is bfloat16."""
    checks = list(run_checks(HOST, "float32"))
    assert [check for check in checks if not check.passed] == []
    assert len({check.name for check in checks}) == len(checks) > 20


def test_what_is_no_number_does_not_pass() -> None:
    """However much is allowed."""
    assert not Check("attention", float(torch.tensor(float("nan"))), 1e9).passed
