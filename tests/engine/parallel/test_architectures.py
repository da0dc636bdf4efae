"""Architectures in parts and in stages, beside the whole: two real processes for tiny models of all that are served so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engine.conformance.architectures import SERVED as TINY
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.parallel.plan import SERVED_IN_PARTS, SERVED_IN_STAGES

pytestmark = pytest.mark.slow


def errors_of(directory: Path, names: list[str], *, tp: int = 1, pp: int = 1) -> dict[str, float | str]:
    """See `compare`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.engine.parallel.compare"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tp), str(pp), str(directory), *names], stdout=subprocess.PIPE
        )
        for rank in range(tp * pp)
    ]
    outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    found: dict[str, float | str] = json.loads(outputs[0].splitlines()[-1])
    return found


@pytest.mark.parametrize(("tp", "pp", "served"), [(2, 1, SERVED_IN_PARTS), (1, 2, SERVED_IN_STAGES)])
def test_each_architecture_gives_the_logits_of_one_process(
    tmp_path: Path, tp: int, pp: int, served: frozenset[str]
) -> None:
    """Up to rounding, with windows, experts, norms and sinks; and the blocks are cut as those of one process."""
    names = [name for name in TINY if _type_of(name) in served]
    assert {_type_of(name) for name in names} == served
    found = errors_of(tmp_path, names, tp=tp, pp=pp)
    wrong = {name: error for name, error in found.items() if isinstance(error, str) or not error < 1e-4}
    assert wrong == {}


def _type_of(name: str) -> str:
    found: str = build_tiny(name).config.model_type
    return found
