"""What the workers of a cluster that is ready can hold, as lines for whoever started it."""

from collections.abc import Mapping

import grpc

from paceline.runtime.channels import Channels
from paceline.runtime.memory import shown_bytes
from paceline.v1 import worker_pb2
from paceline.v1.worker_pb2_grpc import WorkerServiceStub

_ANSWER_S = 10.0
_REQUEST_TOKENS = 2048  # of what num_2k_requests counts


async def capacity_lines(addresses: Mapping[str, str], channels: Channels) -> list[str]:
    """A line for each worker, by name, and one for the longest request. The channels are closed."""
    try:
        infos = {name: await _info(channels.get(address)) for name, address in addresses.items()}
    finally:
        await channels.aclose()
    known = [info for info in infos.values() if info is not None]
    return [
        *(_worker_line(name, info) for name, info in infos.items()),
        *([_limit_line(known)] if known else []),
    ]


async def _info(channel: grpc.aio.Channel) -> worker_pb2.GetInfoResponse | None:
    """None for a worker that has just died: it will come back, and these lines are no reason to stop."""
    try:
        return await WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest(), timeout=_ANSWER_S)
    except grpc.aio.AioRpcError:
        return None


def _worker_line(name: str, info: worker_pb2.GetInfoResponse | None) -> str:
    if info is None:
        return f"  {name}: does not answer"
    tokens = min(_REQUEST_TOKENS, info.max_model_tokens)
    return (
        f"  {name}: {info.num_blocks:,} KV blocks ({shown_bytes(info.num_blocks * info.block_bytes)}), "
        f"{info.num_kv_tokens:,} tokens, {info.num_2k_requests:,} requests of {tokens:,} at once"
    )


def _limit_line(infos: list[worker_pb2.GetInfoResponse]) -> str:
    longest = min(info.max_model_tokens for info in infos)
    own = min(info.own_max_model_tokens for info in infos)
    lowered = f"; the model could take {own:,} (--max-model-len, --kv-memory)" if longest < own else ""
    return f"  longest request: {longest:,} tokens, prompt and output together{lowered}"
