"""Where everything of one cluster on this machine is: addresses, ports, directories. Decided before anything starts."""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.launcher.config import UpConfig
from paceline.launcher.probes import listening
from paceline.prefix_index.redis_url import parse_redis_url
from paceline.runtime.addresses import join_host
from paceline.runtime.metrics_server import METRICS_HOST, NO_METRICS


@dataclass(frozen=True, slots=True)
class Layout:
    """One cluster."""

    config: UpConfig
    model: Path
    run_dir: Path
    ports: Mapping[str, int]  # of each router
    kv_bytes: int  # for the KV cache of each worker
    metrics_ports: Mapping[str, int] = field(default_factory=dict)  # of each process; empty: no metrics
    relay_dir: Path | None = (
        None  # where somebody relays connections to workers; None: they are reached directly
    )

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

    def plain_router_address(self, router: str) -> str:
        """Where a router serves this user without TLS, whatever it asks of its clients."""
        return f"unix:{self.run_dir / router}.sock"

    @property
    def redis_socket(self) -> Path:
        return self.run_dir / "redis.sock"

    @property
    def log_dir(self) -> Path:
        return Path(self.config.log_dir) if self.config.log_dir else self.run_dir / "logs"

    @property
    def cores_file(self) -> Path:
        """By which workers lend each other cores."""
        return self.run_dir / "cores"

    @property
    def salt_file(self) -> Path:
        """A secret that the routers have in common."""
        return self.run_dir / "cache.salt"

    @property
    def routers(self) -> tuple[str, ...]:
        return tuple(self.ports)

    def router_address(self, router: str) -> str:
        return join_host(self.config.host, self.ports[router])

    def local_router_address(self, router: str) -> str:
        """A router's address for a client on this machine."""
        return join_host(local_host(self.config.host), self.ports[router])

    def probed_router_address(self, router: str) -> str:
        """Where we ask it whether it serves."""
        if self.config.public_tls.check():
            return self.plain_router_address(router)
        return self.local_router_address(router)

    @property
    def prefill(self) -> tuple[str, ...]:
        return _names("prefill", self.config.shape.num_prefill)

    @property
    def decode(self) -> tuple[str, ...]:
        return _names("decode", self.config.shape.num_decode)

    def worker_socket(self, worker: str) -> Path:
        return self.run_dir / f"{worker}.sock"

    def worker_address(self, worker: str) -> str:
        return f"unix:{self.worker_socket(worker)}"

    def told_address(self, worker: str) -> str:
        """Where the other processes are told that a worker is."""
        return f"unix:{self.relay_dir / worker}.sock" if self.relay_dir else self.worker_address(worker)

    def metrics_port(self, name: str) -> int:
        return self.metrics_ports.get(name, NO_METRICS)

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """Where each process that has metrics serves them, for a client on this machine."""
        hosts = dict.fromkeys(self.routers, local_host(self.config.host))
        return {
            name: join_host(hosts.get(name, METRICS_HOST), port) for name, port in self.metrics_ports.items()
        }


def local_host(host: str) -> str:
    """Where a client on this machine finds what listens on `host`."""
    anywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - recognised here, bound nowhere
    return anywhere.get(host, host)


def router_names(config: UpConfig) -> tuple[str, ...]:
    """One is called router, several router-0, router-1, ..."""
    return ("router",) if config.routers == 1 else _names("router", config.routers)


def worker_names(config: UpConfig) -> tuple[str, ...]:
    """prefill-0, ..., decode-0, ..."""
    shape = config.shape
    return (*_names("prefill", shape.num_prefill), *_names("decode", shape.num_decode))


def router_ports(config: UpConfig) -> dict[str, int]:
    """A port for each router; raises ConfigError for one that is taken."""
    return _free_ports(dict.fromkeys(router_names(config), config.host), config.port, "--port")


def metrics_ports(config: UpConfig) -> dict[str, int]:
    """A port for each process; raises ConfigError for one that is taken."""
    if config.metrics_port == NO_METRICS:
        return {}
    hosts = dict.fromkeys(router_names(config), config.host)
    hosts |= dict.fromkeys(worker_names(config), METRICS_HOST)
    return _free_ports(hosts, config.metrics_port, "--metrics-port")


def _free_ports(hosts: Mapping[str, str], first: int, flag: str) -> dict[str, int]:
    """One port after the other on the host of each name, or any for 0; all are held until all are found."""
    with contextlib.ExitStack() as held:
        return {
            name: held.enter_context(listening(host, first and first + offset, flag))
            for offset, (name, host) in enumerate(hosts.items())
        }


def _names(tier: str, count: int) -> tuple[str, ...]:
    return tuple(f"{tier}-{index}" for index in range(count))
