"""Architectures in parts, beside the whole: two real processes for tiny models of all that are served so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engine.conformance.architectures import SERVED as TINY
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.parallel.plan import SERVED

pytestmark = pytest.mark.slow


def in_parts(directory: Path, names: list[str], num_ranks: int = 2) -> dict[str, float | str]:
    """See `compare`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.parallel.compare"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(num_ranks), str(directory), *names], stdout=subprocess.PIPE
        )
        for rank in range(num_ranks)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    found: dict[str, float | str] = json.loads(outputs[0].splitlines()[-1])
    return found


def test_each_architecture_gives_the_logits_of_the_whole(tmp_path: Path) -> None:
    """Up to rounding, with windows, experts, norms and sinks; and the blocks are cut as those of the whole."""
    names = [name for name in TINY if _type_of(name) in SERVED]
    assert {_type_of(name) for name in names} == SERVED
    found = in_parts(tmp_path, names)
    wrong = {name: error for name, error in found.items() if isinstance(error, str) or not error < 1e-4}
    assert wrong == {}


def _type_of(name: str) -> str:
    found: str = build_tiny(name).config.model_type
    return found
