"""Fixtures that many tests share."""

import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.fake_inference import FakeInference, serve_fake_inference
from tests.tiny_model import write_tiny_model, write_tiny_tokenizer

ROOT = Path(__file__).parents[1]

# The same examples every time: what fails, fails for everybody. `./run test --slow` looks further.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.register_profile("far", max_examples=2000, deadline=None)
settings.load_profile("far" if os.environ.get("PACELINE_TEST_TIER") == "slow" else "steady")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with a tiny random Llama."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same directory without weights, for the fake runner; making it needs no torch."""
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tiny-tokenizer"))


@pytest.fixture
async def fake_inference() -> AsyncIterator[FakeInference]:
    """A fake InferenceService, listening."""
    async with serve_fake_inference() as service:
        yield service


@pytest.fixture(scope="session")
def node_example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node example after `npm ci`, in a copy, so that the checkout stays as it is."""
    npm = shutil.which("npm")
    # Where CI has no node, the tests fail: there they must not go missing unseen.
    if npm is None and not os.environ.get("CI"):
        pytest.skip("node and npm are not installed")
    root = tmp_path_factory.mktemp("node")
    skip_installed = shutil.ignore_patterns("node_modules")
    shutil.copytree(ROOT / "examples" / "node", root / "examples" / "node", ignore=skip_installed)
    shutil.copytree(ROOT / "examples" / "protos", root / "examples" / "protos")
    shutil.copytree(ROOT / "protos", root / "protos")
    directory = root / "examples" / "node"
    subprocess.run([npm or "npm", "ci"], cwd=directory, check=True, capture_output=True, timeout=100)
    return directory
