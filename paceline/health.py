"""`./run health ADDRESS`: whether a process serves, as an exit status, for probes of containers and scripts.

Each question is a process of its own, so this imports little: its start is what a probe costs.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

EXIT_NOT_SERVING = 1
_METHOD = "/grpc.health.v1.Health/Check"


def main(argv: Sequence[str] | None = None) -> int:
    """Asks once, and says the answer; 0: it serves."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if bool(args.tls_cert) != bool(args.tls_key):
        parser.error("--tls-cert and --tls-key go together")
    try:
        answer = _ask(args)
    except OSError as error:
        answer = f"cannot read {error.filename}: {error.strerror}"
    except grpc.RpcError as error:
        call: Any = error  # what a channel raises is both, which the types do not say
        answer = f"{call.code().name}: {call.details()}"
    sys.stdout.write(f"{answer}\n")
    return 0 if answer == "SERVING" else EXIT_NOT_SERVING


def _ask(args: argparse.Namespace) -> str:
    request = health_pb2.HealthCheckRequest(service=args.service)
    with _channel(args) as channel:
        check = channel.unary_unary(
            _METHOD,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        answer: health_pb2.HealthCheckResponse = check(request, timeout=args.timeout)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def _channel(args: argparse.Namespace) -> grpc.Channel:
    """Plain, or with TLS where any of its files is named."""
    if not (args.tls_ca or args.tls_cert):
        return grpc.insecure_channel(args.address)
    ca, key, cert = (file and file.read_bytes() for file in (args.tls_ca, args.tls_key, args.tls_cert))
    name = (("grpc.ssl_target_name_override", args.tls_name),) if args.tls_name else ()
    return grpc.secure_channel(args.address, grpc.ssl_channel_credentials(ca, key, cert), options=name)


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="./run health", description="Ask one process whether it serves; exit status 0 means yes."
    )
    add = parser.add_argument
    add("address", metavar="ADDRESS", help="host:port, or unix:/path")
    add("--service", default="", help="a gRPC service's full name, or liveness; without it the whole process")
    add("--timeout", type=float, default=5.0, metavar="S", help="seconds for an answer (%(default)g)")
    add(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="it speaks TLS, with a certificate that this CA has signed",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="our own certificate, where it asks for one, in PEM")
    add("--tls-key", type=Path, metavar="FILE", help="the key of --tls-cert")
    add("--tls-name", metavar="NAME", help="the name in its certificate, if not its host's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
