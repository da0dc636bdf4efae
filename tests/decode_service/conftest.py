"""What the tests of a decode worker's sessions share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.decode_service.pair import Pair, open_pair


@pytest.fixture
async def pair(tiny_tokenizer_dir: Path) -> AsyncIterator[Pair]:
    """Two workers and a session, closed in the end."""
    async with open_pair(tiny_tokenizer_dir) as pair:
        yield pair
