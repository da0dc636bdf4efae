"""Real models, in fp32 and whole, give on every path what plain transformers gives."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.engine.conformance.paths import PATHS
from paceline.launcher.models import PACKAGED_MODELS, resolve_model

# Gemma's logits reach a hundred, and fp32 rounds to some millionths of that. Tokens are compared without any tolerance.
TOLERANCE = "1e-3"
# The first time, a model is also fetched and converted.
pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("name", PACKAGED_MODELS)
def test_every_path_of_a_real_model_is_plain_transformers(name: str, tmp_path: Path) -> None:
    """`./run conformance --model` passes, with prompts that are longer than the model's windows."""
    numbers = tmp_path / "numbers.json"
    # A process of its own: it takes gigabytes, and all cores.
    flags = ["--model", str(resolve_model(name, print)), "--tolerance", TOLERANCE, "--json", str(numbers)]
    command = [sys.executable, "-P", "-m", "paceline.engine.conformance", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "note: no prompt is longer" not in done.stdout
    found = json.loads(numbers.read_text(encoding="utf-8"))
    assert (found["cases"], found["failed"]) == (len(PATHS), 0)
