"""Every generator along a request's way is closed by whoever reads it, in its turn, and none by the garbage collector."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from router.tokenizer import Tokenizer
from tests.left_generators import left_generators
from tests.router.test_service import answer, request, spec_of
from tests.router.whole import Call, whole_router
from tests.worker.bench import output_of


class Leaver(Call):
    """A client that goes with the first piece of its answer: fast ones may have no second."""

    async def write(self, message: Any) -> None:
        """Takes all until then."""
        await super().write(message)
        if any(response.HasField("delta") for response in self.responses):
            raise asyncio.CancelledError


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_no_generator_is_left_however_a_request_ends(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, disaggregate: str
) -> None:
    """With the last token, with a stop string, or with its client; whoever computes the prompt."""
    stop = byte_level.decode(output_of(spec_of())[:12])[-4:]
    async with whole_router(tiny_tokenizer_dir, byte_level, disaggregate=disaggregate) as router:
        with left_generators() as names:
            await answer(router, request())
            await answer(router, request(stop=(stop,)))
            with pytest.raises(asyncio.CancelledError):
                await router.generate(request(), Leaver())
            await router.until_idle()
        assert not names
