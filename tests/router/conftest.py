"""Tokenizers of both kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.tokenizer import Tokenizer
from tests.prefix_index.conftest import embedded_redis
from tests.tiny_model import write_byte_fallback_tokenizer

__all__ = ["embedded_redis"]


@pytest.fixture(scope="session")
def byte_level(tiny_tokenizer_dir: Path) -> Iterator[Tokenizer]:
    """A byte-level BPE tokenizer with a chat template."""
    tokenizer = Tokenizer(tiny_tokenizer_dir)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokenizer]:
    """A tokenizer in the manner of SentencePiece, without a chat template."""
    tokenizer = Tokenizer(write_byte_fallback_tokenizer(tmp_path_factory.mktemp("byte-fallback")))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Each of them in turn."""
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found
