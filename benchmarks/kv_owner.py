"""A process that owns computed blocks and nothing else: the other end of `./run bench kv`. It lends as many as it is asked for."""

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Callable

from kvtransfer.block_store import MemoryBlockStore
from kvtransfer.chunks import MAX_CHUNK_BYTES
from kvtransfer.leases import LeaseTable
from kvtransfer.lending import PrefixRequest
from kvtransfer.offer import MemoryOffer
from kvtransfer.sender import KVSender
from kvtransfer.service import KvTransferServicer, add_kv_transfer_service
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import Nixl
from paceline.core.block_hash import BlockHash
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.request import BootEpoch, RequestId, SequenceId, WorkerId
from paceline.core.ticket import KvTicket, ReadyBlock
from paceline.runtime.channels import Channels
from paceline.runtime.memory import keep_freed_memory
from paceline.runtime.server import GrpcServer
from paceline.v1 import kv_transfer_pb2

FINGERPRINT = ModelFingerprint(
    "bench", "bench", "bench", "bench", "uint8", "uint8", "bench", "0/1", 16, "none", "fast"
)
BOOT_EPOCH = BootEpoch(1)


class BlockLender:
    """Lends its first blocks in an order of its own, one for each token that is named. Its hashes are made up."""

    def __init__(self, address: str, num_blocks: int, block_bytes: int, message_bytes: int) -> None:
        self._address = address
        self._leases = LeaseTable(lambda _: None)
        self._numbers = itertools.count()
        store = MemoryBlockStore(num_blocks, block_bytes)
        fill(store, num_blocks)
        order = random.Random(1).sample(range(num_blocks), num_blocks)  # noqa: S311 - an order, no secret
        self._blocks = [ReadyBlock(BlockId(index), store.checksum(BlockId(index))) for index in order]
        nixl = open_nixl("owner", store, lambda: self._leases.stats().num_active > 0)
        self.sender = KVSender(
            self._leases,
            store,
            FINGERPRINT,
            BOOT_EPOCH,
            offer=MemoryOffer(
                num_blocks, block_bytes, store.pool.offer, None if nixl is None else nixl.offer
            ),
            on_read=(lambda: None) if nixl is None else nixl.expect_readers,
            max_chunk_bytes=min(message_bytes, MAX_CHUNK_BYTES),
            max_message_bytes=message_bytes,
        )

    async def lend(
        self, request: PrefixRequest, boot_epoch: BootEpoch, fingerprint: ModelFingerprint
    ) -> KvTicket:
        """See PrefixLender.lend."""
        fingerprint.require_same(FINGERPRINT)
        blocks = self._blocks[: len(request.token_ids)]
        hashes = tuple(BlockHash(index.to_bytes(16)) for index in range(len(blocks)))
        sequence_id = SequenceId(RequestId(f"loan-{next(self._numbers)}"), 0)
        lease = self._leases.grant(sequence_id, len(blocks), hashes)
        self._leases.progress(lease.lease_id, blocks)
        self._leases.complete(lease.lease_id, ())
        return KvTicket(
            lease_id=lease.lease_id,
            owner_id=WorkerId("owner"),
            owner_address=self._address,
            boot_epoch=boot_epoch,
            fingerprint=fingerprint,
            block_hashes=hashes,
            num_blocks=len(blocks),
        )


def open_nixl(name: str, store: MemoryBlockStore, is_read: Callable[[], bool]) -> Nixl | None:
    """An agent for the store, where NIXL is installed."""
    if not Nixl.is_installed():
        return None
    agent, grpc = f"{name}-{os.getpid()}-{time.time_ns()}", GrpcTransport(Channels(), FINGERPRINT)
    return Nixl.open(agent, store.pool, store.block_bytes, grpc, is_read)


def fill(store: MemoryBlockStore, num_blocks: int) -> None:
    """Other bytes in each block, and every page touched."""
    rng = random.Random(2)  # noqa: S311 - content, no secret
    content = bytearray(rng.randbytes(store.block_bytes))
    for index in range(num_blocks):
        content[:8] = index.to_bytes(8)
        store.write(BlockId(index), 0, bytes(content))


async def _serve(args: argparse.Namespace) -> None:
    lender = BlockLender(args.listen, args.blocks, args.block_bytes, args.message_bytes)
    server = GrpcServer(args.listen)
    add_kv_transfer_service(KvTransferServicer(lender.sender, lender), server.grpc)
    await server.start([kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name])
    # Until whoever has started us closes the pipe, by dying if need be.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    await server.stop(grace_s=0.1)


def main() -> None:
    """Serves until its standard input ends."""
    keep_freed_memory()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    for name in ("--blocks", "--block-bytes", "--message-bytes"):
        parser.add_argument(name, type=int, required=True)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
