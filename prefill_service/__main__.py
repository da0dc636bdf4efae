"""`python -m prefill_service`: one prefill worker."""

import sys

import grpc

from paceline.runtime.config import load_config
from paceline.v1 import inference_pb2, prefill_pb2
from paceline.v1.prefill_pb2_grpc import add_PrefillServiceServicer_to_server
from paceline.worker.run import run_worker
from paceline.worker.worker import Worker
from prefill_service.config import PrefillConfig
from prefill_service.service import PrefillServicer


def add_service(server: grpc.aio.Server, worker: Worker) -> str:
    """Puts PrefillService on the server."""
    add_PrefillServiceServicer_to_server(PrefillServicer(worker), server)
    return prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"].full_name


def main() -> int:
    """Runs until SIGTERM."""
    config = load_config(
        PrefillConfig,
        sys.argv[1:],
        prog="python -m prefill_service",
        section="prefill",
        about="A prefill worker: computes prompts and holds their KV cache until a decode worker has pulled it.",
    )
    return run_worker(config, inference_pb2.WORKER_ROLE_PREFILL, add_service)


if __name__ == "__main__":
    sys.exit(main())
