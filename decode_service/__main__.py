"""`python -m decode_service`: one decode worker."""

import sys

import grpc

from decode_service.config import DecodeConfig
from decode_service.service import DecodeServicer
from paceline.runtime.config import load_config
from paceline.v1 import decode_pb2, inference_pb2
from paceline.v1.decode_pb2_grpc import add_DecodeServiceServicer_to_server
from paceline.worker.run import run_worker
from paceline.worker.worker import Worker


def add_service(server: grpc.aio.Server, worker: Worker) -> str:
    """Puts DecodeService on the server."""
    add_DecodeServiceServicer_to_server(DecodeServicer(worker), server)
    return decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


def main() -> int:
    """Runs until SIGTERM."""
    config = load_config(
        DecodeConfig,
        sys.argv[1:],
        prog="python -m decode_service",
        section="decode",
        about="A decode worker: pulls the KV cache of computed prompts and generates by continuous batching.",
    )
    return run_worker(config, inference_pb2.WORKER_ROLE_DECODE, add_service)


if __name__ == "__main__":
    sys.exit(main())
