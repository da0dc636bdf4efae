"""A hand-over by NIXL (https://github.com/ai-dynamo/nixl): its engine writes the owner's blocks to their places, by RDMA where there is it.

NIXL is an optional extra, imported here and nowhere else. What the owner says comes over gRPC, and so do renewals and the release.
"""

import asyncio
import importlib
import importlib.util
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

from kvtransfer.chunks import KvMessage, KvReference, KvWritten, LeaseState, PullEnd
from kvtransfer.offer import MemoryOffer, NixlOffer
from kvtransfer.transports.base import TransportBrokenError
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.in_flight import InFlight
from paceline.core.block_hash import BlockHash
from paceline.core.kv_layout import BlockId
from paceline.core.ticket import KvTicket
from paceline.runtime.pool_memory import PoolMemory

_PACKAGE = "nixl_cu12"
# Where the processor has to move the bytes, it does so while the engine is looked at: that long the event loop waits.
_MAX_TRANSFER_BYTES = 8 << 20
# Nobody wakes us: we look. An engine with a thread of its own would take a core to look all the time.
_LOOK_S, _IDLE_LOOK_S = 0.001, 0.1
# A look that takes longer than that has moved something, and there may be more: the next one follows when others had their turn.
_BUSY_LOOK_S = 30e-6
_TRANSFER_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 1.0
_NUM_LAST_LOOKS, _LAST_LOOK_S = 100, 0.01
_IN_PROGRESS, _DONE = "PROC", "DONE"


class Nixl:
    """The way by NIXL: one agent for a worker, with which its pool is registered once, to be read by others and written to itself.

    Without RDMA the engine answers others only when it is looked at: `expect_readers` says that they are about to come, and `is_read` for
    how long.
    """

    name = "nixl"
    writes_in_place = True

    def __init__(
        self,
        agent: Any,
        pool: PoolMemory,
        block_bytes: int,
        grpc: GrpcTransport,
        is_read: Callable[[], bool],
    ) -> None:
        self._agent = agent
        self._pool = pool
        self._block_bytes = block_bytes
        self._grpc = grpc
        self._is_read = is_read
        self._in_flight = InFlight()
        self._registered = agent.register_memory([(pool.address, len(pool.buffer), 0, "")], "DRAM")
        self.offer = NixlOffer(agent.name, agent.get_agent_metadata(), pool.address)
        self._asked = asyncio.Event()
        self._answering = asyncio.create_task(self._answer_forever())

    @staticmethod
    def is_installed() -> bool:
        """Whether the optional extra is there."""
        return importlib.util.find_spec(_PACKAGE) is not None

    @classmethod
    def open(
        cls, name: str, pool: PoolMemory, block_bytes: int, grpc: GrpcTransport, is_read: Callable[[], bool]
    ) -> "Nixl":
        """With an agent called `name`, as nobody else is ever called; raises TransportBrokenError where NIXL does not start."""
        try:
            api = importlib.import_module(f"{_PACKAGE}._api")
            # It would tell the standard output, in lines of its own, what we log ourselves.
            logging.getLogger("nixl").setLevel(logging.WARNING)
            agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
            return cls(agent, pool, block_bytes, grpc, is_read)
        except Exception as error:
            raise TransportBrokenError(f"NIXL does not start here: {error}") from error

    def connect(self, offer: MemoryOffer) -> "NixlTransport":
        """Takes in what an owner's agent says of itself; raises TransportBrokenError, saying why, when that cannot be."""
        if offer.nixl is None:
            raise TransportBrokenError("it offers no NIXL")
        if offer.block_bytes != self._block_bytes:
            raise TransportBrokenError(f"its blocks have {offer.block_bytes} bytes, ours {self._block_bytes}")
        try:
            self._agent.add_remote_agent(offer.nixl.metadata)
        except Exception as error:
            raise TransportBrokenError(f"NIXL cannot reach it: {error}") from error
        return NixlTransport(self, self._grpc, offer, offer.nixl)

    async def read(self, owner: NixlOffer, blocks: Sequence[KvReference], places: Sequence[BlockId]) -> None:
        """Has some of an owner's blocks written to our places; raises TransportBrokenError. A cancel does not stop the engine."""
        try:
            async with asyncio.timeout(_TRANSFER_TIMEOUT_S):
                await self._in_flight.until_written(self._transfer(owner, blocks, places), places)
        except TimeoutError:
            raise TransportBrokenError(f"NIXL is not done after {_TRANSFER_TIMEOUT_S:g} s") from None

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[Any] | None":
        """What the engine still writes."""
        return self._in_flight.settling(into)

    async def aclose(self) -> None:
        """Waits a moment for what is under way, and takes the pool back from the engine."""
        self._answering.cancel()
        await asyncio.wait({self._answering})
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                await self._in_flight.until_empty()
        if not len(self._in_flight):
            self._agent.deregister_memory(self._registered)

    async def _transfer(
        self, owner: NixlOffer, blocks: Sequence[KvReference], places: Sequence[BlockId]
    ) -> None:
        """Ends when the engine is done, or has failed: before that nothing would stop it from writing."""
        try:
            await self._transferred(owner, blocks, places)
        except Exception as error:
            # It may speak of the first block that has failed, and hear of the others in the next moment.
            await self._look_on()
            raise TransportBrokenError(f"NIXL has failed: {error}") from error

    async def _transferred(
        self, owner: NixlOffer, blocks: Sequence[KvReference], places: Sequence[BlockId]
    ) -> None:
        ours = self._descriptors(self._pool.address, places)
        theirs = self._descriptors(owner.address, [block.block_id for block in blocks])
        handle = self._agent.initialize_xfer("READ", ours, theirs, owner.agent)
        state, pace = self._agent.transfer(handle), _Pace()
        while state == _IN_PROGRESS:
            await pace.pause(_LOOK_S)
            with pace:
                state = self._agent.check_xfer_state(handle)
        self._agent.release_xfer_handle(handle)
        if state != _DONE:
            raise TransportBrokenError(state)

    async def _look_on(self) -> None:
        """A second of looks, within which the engine finds out what has become of a connection."""
        for _ in range(_NUM_LAST_LOOKS):
            self._agent.get_new_notifs()
            await asyncio.sleep(_LAST_LOOK_S)

    def _descriptors(self, address: int, block_ids: Sequence[BlockId]) -> Any:
        size = self._block_bytes
        return self._agent.get_xfer_descs(
            [(address + block_id * size, size, 0) for block_id in block_ids], "DRAM"
        )

    def expect_readers(self) -> None:
        """Somebody has been told where blocks lie."""
        self._asked.set()

    async def _answer_forever(self) -> None:
        pace = _Pace()
        while True:
            if self._asked.is_set() and self._is_read():
                await pace.pause(_LOOK_S)
            else:
                self._asked.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), _IDLE_LOOK_S)
            with pace:
                # Nobody sends any: it is the call by which the engine gets its turn.
                self._agent.get_new_notifs()


class NixlTransport:
    """Reads the pool of one owner in one of its lives."""

    def __init__(self, nixl: Nixl, grpc: GrpcTransport, offer: MemoryOffer, owner: NixlOffer) -> None:
        self._nixl = nixl
        self._grpc = grpc
        self._owner = owner
        self._num_blocks = offer.num_blocks
        self._block_bytes = offer.block_bytes
        self._max_blocks = max(1, _MAX_TRANSFER_BYTES // offer.block_bytes)

    async def pull(
        self, ticket: KvTicket, held_hashes: Sequence[BlockHash], into: Sequence[BlockId]
    ) -> AsyncGenerator[KvMessage, None]:
        """Blocks that are in their places already, some at a time; then the end."""
        num_come = len(held_hashes)
        async with aclosing(self._grpc.pull_references(ticket, held_hashes)) as messages:
            async for message in messages:
                if isinstance(message, PullEnd):
                    yield message
                    continue
                for first in range(0, len(message), self._max_blocks):
                    blocks = message[first : first + self._max_blocks]
                    await self._nixl.read(self._owner, blocks, self._places(blocks, into, num_come))
                    num_come += len(blocks)
                    for block in blocks:
                        yield KvWritten(block.ordinal, self._block_bytes, block.checksum)

    def settling(self, into: Sequence[BlockId]) -> "asyncio.Future[Any] | None":
        """What the engine still writes."""
        return self._nixl.settling(into)

    async def renew(self, tickets: Sequence[KvTicket]) -> list[LeaseState]:
        """Keeps the leases alive."""
        return await self._grpc.renew(tickets)

    async def release(self, ticket: KvTicket) -> LeaseState:
        """Ends the lease."""
        return await self._grpc.release(ticket)

    def _places(self, blocks: Sequence[KvReference], into: Sequence[BlockId], num_come: int) -> list[BlockId]:
        """Where they belong, which is the next places. Looked at before an engine writes: it would ask nobody."""
        for ordinal, block in enumerate(blocks, num_come):
            is_next = block.ordinal == ordinal < len(into)
            if block.block_id >= self._num_blocks or not is_next:
                raise TransportBrokenError(
                    f"the owner names block {block.block_id} of {self._num_blocks} for place {block.ordinal} of {len(into)}"
                )
        return [into[block.ordinal] for block in blocks]


class _Pace:
    """How soon to look again: at once after a look that has moved something, else after a pause. Each look is a `with`."""

    def __init__(self) -> None:
        self._began_s, self._has_moved = 0.0, True

    def __enter__(self) -> None:
        self._began_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._has_moved = time.perf_counter() - self._began_s > _BUSY_LOOK_S

    async def pause(self, pause_s: float) -> None:
        """Lets others have their turn, or sleeps."""
        await asyncio.sleep(0.0 if self._has_moved else pause_s)
