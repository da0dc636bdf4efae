"""Where everything of one cluster on this machine is: addresses, ports, directories. Decided before anything starts."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launcher.config import UpConfig
from paceline.launcher.probes import listening
from paceline.prefix_index.redis_url import parse_redis_url
from paceline.runtime.metrics_server import METRICS_HOST, NO_METRICS


@dataclass(frozen=True, slots=True)
class Layout:
    """One cluster."""

    config: UpConfig
    model: Path
    run_dir: Path
    port: int
    kv_bytes: int  # for the KV cache of each worker
    metrics_ports: Mapping[str, int] = field(default_factory=dict)  # of each process; empty: no metrics

    @property
    def redis_url(self) -> str:
        return self.config.redis or f"unix://{self.redis_socket}"

    @property
    def redis_setting(self) -> str:
        """`redis_url` as our processes are told it: what holds a password stands in a file of this user's."""
        address = parse_redis_url(self.redis_url)
        has_secret = address.password or address.sentinel_password
        return f"@{self.redis_file}" if has_secret else self.redis_url

    @property
    def redis_file(self) -> Path:
        return self.run_dir / "redis.url"

    @property
    def token_file(self) -> Path:
        """The secret of this cluster's processes."""
        return self.run_dir / "cluster.token"

    @property
    def plain_router_address(self) -> str:
        """Where the router serves this user without TLS, whatever it asks of its clients."""
        return f"unix:{self.run_dir / 'router.sock'}"

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def log_dir(self) -> Path:
        return Path(self.config.log_dir) if self.config.log_dir else self.run_dir / "logs"

    @property
    def router_address(self) -> str:
        return join_host(self.config.host, self.port)

    @property
    def local_router_address(self) -> str:
        """The router's address for a client on this machine."""
        return join_host(local_host(self.config.host), self.port)

    @property
    def prefill(self) -> tuple[str, ...]:
        return _names("prefill", self.config.shape.num_prefill)

    @property
    def decode(self) -> tuple[str, ...]:
        return _names("decode", self.config.shape.num_decode)

    def worker_address(self, worker: str) -> str:
        return f"unix:{self.run_dir / worker}.sock"

    def metrics_port(self, name: str) -> int:
        return self.metrics_ports.get(name, NO_METRICS)

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """Where each process that has metrics serves them, for a client on this machine."""
        hosts = {"router": local_host(self.config.host)}
        return {
            name: join_host(hosts.get(name, METRICS_HOST), port) for name, port in self.metrics_ports.items()
        }


def join_host(host: str, port: int) -> str:
    """host:port, with the brackets that an IPv6 address needs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def local_host(host: str) -> str:
    """Where a client on this machine finds what listens on `host`."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - recognised here, bound nowhere
    return anywhere.get(host, host)


def metrics_ports(config: UpConfig) -> dict[str, int]:
    """A port for each process; raises ConfigError for one that is taken."""
    if config.metrics_port == NO_METRICS:
        return {}
    shape = config.shape
    workers = (*_names("prefill", shape.num_prefill), *_names("decode", shape.num_decode))
    with contextlib.ExitStack() as held:
        return {
            name: held.enter_context(
                listening(
                    config.host if name == "router" else METRICS_HOST,
                    config.metrics_port and config.metrics_port + offset,
                    "--metrics-port",
                )
            )
            for offset, name in enumerate(("router", *workers))
        }


def _names(tier: str, count: int) -> tuple[str, ...]:
    return tuple(f"{tier}-{index}" for index in range(count))
