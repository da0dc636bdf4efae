"""Keeps a lease from expiring while somebody is about to read under it, or reads."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from kvtransfer.transports.base import KVTransport
from paceline.core.errors import PacelineError
from paceline.core.ticket import KvTicket


@asynccontextmanager
async def keep_alive(
    transport: KVTransport, ticket: KvTicket, *, every_s: float = 5.0
) -> AsyncGenerator[None, None]:
    """Renews the ticket's lease every `every_s` seconds while the body runs.

    A renewal that fails says nothing: the owner may be slow. What counts is the answer to the release.
    """
    renewing = asyncio.create_task(_renew_forever(transport, ticket, every_s))
    try:
        yield
    finally:
        renewing.cancel()
        await asyncio.wait({renewing})


async def _renew_forever(transport: KVTransport, ticket: KvTicket, every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        with suppress(PacelineError):
            await transport.renew(ticket)
