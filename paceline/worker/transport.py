"""How a worker's blocks reach others, and others' blocks reach it: what its setting allows and its memory makes possible."""

from collections.abc import Callable

from kvtransfer.offer import MemoryOffer
from kvtransfer.transports.base import TransportBrokenError
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.negotiated import GRPC, NegotiatedTransport, Way
from kvtransfer.transports.nixl import Nixl
from kvtransfer.transports.shm import SharedMemory
from paceline.core.errors import ConfigError
from paceline.engine.engine import BlockMemory
from paceline.runtime.log import get_logger

_AUTO = "auto"

log = get_logger()


class WorkerTransport:
    """One worker's way out and in. Raises ConfigError for a setting that cannot work on this machine.

    `agent` is a name that no other worker and no other life of this one has; `is_read` says whether others may be reading. NIXL does
    not encrypt: with `must_encrypt` it has to be asked for by name.
    """

    def __init__(
        self,
        kv_transport: str,
        grpc: GrpcTransport,
        memory: BlockMemory,
        num_blocks: int,
        *,
        agent: str,
        is_read: Callable[[], bool],
        must_encrypt: bool = False,
    ) -> None:
        is_auto, pool = kv_transport == _AUTO, memory.pool
        shared = pool.offer if pool is not None and (is_auto or kv_transport == SharedMemory.name) else None
        nixl: Nixl | None = None
        is_installed = is_auto and Nixl.is_installed()
        if pool is not None and wants_nixl(
            kv_transport, is_installed=is_installed, must_encrypt=must_encrypt
        ):
            nixl = _open_nixl(
                lambda: Nixl.open(agent, pool, memory.block_bytes, grpc, is_read), is_required=not is_auto
            )
        # The best one first.
        ways: list[Way] = [] if shared is None else [SharedMemory(grpc)]
        ways += [] if nixl is None else [nixl]
        is_required = kv_transport not in {_AUTO, GRPC}
        if is_required and not ways:
            raise ConfigError(
                f"--kv-transport {kv_transport}: this memory cannot be shared between processes; use auto or grpc"
            )
        self.receiving = NegotiatedTransport(grpc, ways, is_required=is_required)
        self.on_read: Callable[[], None] = (lambda: None) if nixl is None else nixl.expect_readers
        self.offer = MemoryOffer(num_blocks, memory.block_bytes, shared, None if nixl is None else nixl.offer)


def wants_nixl(kv_transport: str, *, is_installed: bool, must_encrypt: bool) -> bool:
    """Whether blocks may pass by NIXL: where it is asked for, and else where it is there and need not encrypt, which it does not."""
    return kv_transport == Nixl.name or (kv_transport == _AUTO and is_installed and not must_encrypt)


def _open_nixl(open_nixl: Callable[[], Nixl], *, is_required: bool) -> Nixl | None:
    try:
        return open_nixl()
    except TransportBrokenError as error:
        if is_required:
            raise ConfigError(
                f"--kv-transport nixl: {error}; pip install -c constraints.txt -e '.[nixl]', or use auto or grpc"
            ) from error
        log.warning("nixl_unavailable", why=str(error))
        return None
