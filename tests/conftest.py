"""Fixtures that many tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fake_inference import FakeInference, serve_fake_inference
from tests.tiny_model import write_tiny_model, write_tiny_tokenizer


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
