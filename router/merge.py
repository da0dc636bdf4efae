"""Several streams of events as one. It knows nothing of what they say."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """The events of all streams in the order of their arrival; the first error ends all.

    A stream goes on only after its event has been taken, so that nothing gathers here and each stays as slow as its reader.
    """
    arriving = {asyncio.ensure_future(anext(stream, None)): stream for stream in streams}
    try:
        while arriving:
            done, _ = await asyncio.wait(arriving, return_when=asyncio.FIRST_COMPLETED)
            for next_event in done:
                event = next_event.result()
                stream = arriving.pop(next_event)
                if event is not None:
                    yield event
                    arriving[asyncio.ensure_future(anext(stream, None))] = stream
    finally:
        for next_event in arriving:
            next_event.cancel()
        # A generator can be closed only when nobody waits in it.
        await asyncio.gather(*arriving, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
