"""A service that says that it serves and what it holds: the router and the workers, as far as the launcher sees them."""

import os
import signal
import sys
from concurrent import futures
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.v1 import worker_pb2

SERVICES = ("router", "prefill_service", "decode_service")


def install(directory: Path) -> None:
    """Put packages under the services' names into `directory`, to come first on PYTHONPATH."""
    for service in SERVICES:
        package = directory / service
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "__main__.py").write_text(
            "from tests.launcher.stand_in import main\nmain()\n", encoding="utf-8"
        )


def _info(request: bytes, context: object) -> worker_pb2.GetInfoResponse:
    """Of a worker that holds what its flags say."""
    return worker_pb2.GetInfoResponse(
        max_model_tokens=int(_flag("--max-model-len")) or 8192,
        own_max_model_tokens=8192,
        num_blocks=int(_flag("--kv-memory").removesuffix("B")) >> 20,
        block_bytes=1 << 20,
        num_kv_tokens=10_000,
        num_2k_requests=4,
    )


def _worker_service() -> grpc.GenericRpcHandler:
    serialize = worker_pb2.GetInfoResponse.SerializeToString
    info: grpc.RpcMethodHandler[bytes, worker_pb2.GetInfoResponse] = grpc.unary_unary_rpc_method_handler(
        _info, response_serializer=serialize
    )
    return grpc.method_handlers_generic_handler("paceline.v1.WorkerService", {"GetInfo": info})


def main() -> None:
    """Serve until SIGTERM, or misbehave as STAND_IN_<NAME> says: die at start, or ignore SIGTERM."""
    name = _flag("--worker-id") or "router"
    behaviour = os.environ.get(f"STAND_IN_{name}", "")
    if behaviour == "dies":
        sys.stderr.write("loading\nerror: no room for the KV cache\n")
        sys.exit(3)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_generic_rpc_handlers((_worker_service(),))
    server.add_insecure_port(_flag("--listen"))
    if _flag("--plain-listen"):
        server.add_insecure_port(_flag("--plain-listen"))
    server.start()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    _wait(ignore_term=behaviour == "stubborn")
    server.stop(0).wait()


def _wait(*, ignore_term: bool) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_term else signal.SIG_DFL)
    if ignore_term:
        signal.pause()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.sigwait({signal.SIGTERM})


def _flag(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else ""
