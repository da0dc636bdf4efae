"""How a worker's blocks reach others, and others' blocks reach it: what its setting allows and its memory makes possible."""

from kvtransfer.offer import MemoryOffer
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import GRPC, NegotiatedTransport
from kvtransfer.transports.shm import SharedMemory
from paceline.core.errors import ConfigError
from paceline.engine.engine import BlockMemory

_AUTO = "auto"


class WorkerTransport:
    """One worker's way out and in. Raises ConfigError for a setting that cannot work on this machine."""

    def __init__(self, kv_transport: str, grpc: GrpcTransport, memory: BlockMemory, num_blocks: int) -> None:
        may_share = kv_transport in {_AUTO, SharedMemory.name}
        shared = memory.pool.offer if memory.pool is not None and may_share else None
        is_required = kv_transport not in {_AUTO, GRPC}
        if is_required and shared is None:
            raise ConfigError(
                f"--kv-transport {kv_transport}: this memory cannot be shared between processes; use auto or grpc"
            )
        ways = [] if shared is None else [SharedMemory(grpc)]
        self.receiving = NegotiatedTransport(grpc, ways, is_required=is_required)
        self.offer = MemoryOffer(num_blocks, memory.block_bytes, shared)
