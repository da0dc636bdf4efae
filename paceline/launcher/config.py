"""What `./run up` can be told, and the shape of the cluster that it means."""

import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KV_TYPES
from paceline.launcher.models import DEFAULT_MODEL, PACKAGED_MODELS
from paceline.prefix_index.redis_url import parse_redis_url
from paceline.runtime.config import option
from paceline.runtime.memory import MemorySize, shown_bytes
from paceline.runtime.metrics_server import check_metrics_port
from paceline.runtime.serving import QUANTIZATIONS, check_open, check_serving
from paceline.runtime.tls import TlsFiles

# Those of the router, which this package does not import; a test holds the two alike.
PLACEMENTS = ("prefix-aware", "consistent-hash", "least-loaded", "round-robin")
_MAX_WORKERS = 64  # more processes than this on one machine is a typing mistake
_MAX_ROUTERS = 16


@dataclass(frozen=True, slots=True)
class Topology:
    """How many workers of each tier: 2P1D is two that prefill and one that decodes."""

    num_prefill: int
    num_decode: int

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """The topology written as xPyD; raises ConfigError when it makes no cluster."""
        match = re.fullmatch(r"(\d{1,4})P(\d{1,4})D", text.strip(), re.IGNORECASE | re.ASCII)
        if match is None:
            raise ConfigError(f"--topology {text!r} is not of the form xPyD, such as 1P1D or 2P1D")
        topology = cls(int(match[1]), int(match[2]))
        if topology.num_decode < 1:
            raise ConfigError(f"--topology {topology}: somebody must decode; yD must be at least 1D")
        if topology.num_workers > _MAX_WORKERS:
            raise ConfigError(f"--topology {topology}: more than {_MAX_WORKERS} workers on one machine")
        return topology

    @property
    def num_workers(self) -> int:
        return self.num_prefill + self.num_decode

    def __str__(self) -> str:
        return f"{self.num_prefill}P{self.num_decode}D"


# What `./run up` tells the services itself, the same to all of a tier or to each its own.
_DECIDED_HERE = frozenset(
    {
        "listen",
        "advertise",
        "worker_id",
        "model",
        "device",
        "gpu_turn",
        "dtype",
        "kv_dtype",
        "kv_transport",
        "mla",
        "quantization",
        "exactness",
        "max_model_len",
        "kv_memory",
        "runner",
        "threads",
        "cores_file",
        "first_core",
        "redis",
        "prefill",
        "decode",
        "disaggregate",
        "placement",
        "metrics_port",
        "pinned_prefixes",
        "tenants",
        "allow_anonymous",
        "tls_cert",
        "tls_key",
        "tls_client_ca",
        "plain_listen",
        "cluster_token_file",
        "cluster_tls_cert",
        "cluster_tls_key",
        "cluster_tls_ca",
        "cluster_tls_name",
        "allow_plaintext",
        "register",
        "limiter_routers",
    }
)

_SERVICES = ("router", "prefill", "decode")


def require_free_sections(file: Path) -> None:
    """Raises ConfigError when a service's section sets what `./run up` decides: its flags would win, silently."""
    tables = _read(file)
    unknown = sorted(tables.keys() - {"up", *_SERVICES})
    if unknown:
        raise ConfigError(f"{file}: nobody reads [{unknown[0]}]; known: [up], [router], [prefill], [decode]")
    for section in _SERVICES:
        taken = sorted(_DECIDED_HERE & tables.get(section, {}).keys())
        if taken:
            raise ConfigError(
                f"{file}: [{section}] sets {', '.join(taken)}, which ./run up decides; set it in [up]"
            )


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the config file {file}: {error}") from error


@dataclass(frozen=True, slots=True)
class UpConfig:
    """The flags of `./run up`, and the [up] section of its config file."""

    config: str | None = option(
        None, "a TOML file: [up] for this command; [router], [prefill], [decode] go on"
    )
    topology: str = option("1P1D", "workers of each tier, xPyD; 0P1D decodes without a prefill tier")
    routers: int = option(1, "routers, which share tenants' limits and the prefix table")
    discovery: str = option(
        "static",
        "how routers find workers: static: they are told their addresses; redis: by what workers register there",
        choices=("static", "redis"),
    )
    model: str = option(
        DEFAULT_MODEL.name, f"{', '.join(PACKAGED_MODELS)}, a Hugging Face directory, or a hub id"
    )
    device: str = option(
        "auto",
        "what the workers compute on: cpu; cuda, the GPUs in turns; cuda:N, all on that one; auto: cuda where there is one",
    )
    dtype: str = option(
        "auto",
        "what the workers compute in; auto: bfloat16 where the processor multiplies it fast, else float32",
        choices=("auto", "float32", "bfloat16"),
    )
    kv_dtype: str = option(
        "auto", "what the KV cache keeps; auto: as the workers compute", choices=("auto", *KV_TYPES)
    )
    kv_transport: str = option(
        "auto",
        "how blocks pass between workers; auto: shared memory, else NIXL where it is installed, else gRPC",
        choices=("auto", "grpc", "shm", "nixl"),
    )
    mla: str = option(
        "expanded",
        "what MLA models keep: expanded keys and values, or the latent that they are made from",
        choices=("expanded", "latent"),
    )
    quantization: str = option("none", "the bits of weights and activations", choices=QUANTIZATIONS)
    exactness: str = option(
        "fast", "exact: the same request gives the same bits on every path", choices=("fast", "exact")
    )
    max_model_len: int = option(0, "longest prompt and output together, in tokens; 0: the model's own limit")
    # The same limits at every start, whatever else runs, and room for two copies of a small model on 8 GiB.
    kv_memory: str = option(
        "2GiB", "memory for the KV caches of all workers together: 4GiB, 512MiB, or 40% of what is free"
    )
    pinned_prefixes: str | None = option(
        None, 'prefixes that every worker keeps in its cache: a JSON Lines file, {"token_ids": [..]} a line'
    )
    redis: str | None = option(
        None, "redis://... of the prefix table, or another form of URL; without it one is started here"
    )
    disaggregate: str = option("auto", "when to prefill apart", choices=("always", "auto", "never"))
    placement: str = option("prefix-aware", "how the router chooses workers", choices=PLACEMENTS)
    host: str = option(
        "127.0.0.1", "the interface that the router listens on; 0.0.0.0 opens it to the network"
    )
    port: int = option(
        50051, "the router's port, and those after it for more routers; 0 takes any that are free"
    )
    metrics_port: int = option(
        0,
        "the first router's port for metrics, and those after it for the others' and the workers'; 0: any that are free, -1: no metrics",
    )
    tls_cert: str | None = option(
        None, "certificate that the router's clients see, in PEM; with it they need TLS"
    )
    tls_key: str | None = option(None, "the key of --tls-cert, in PEM, without a password")
    tls_client_ca: str | None = option(
        None, "a CA, in PEM: clients must show a certificate that it has signed"
    )
    tenants: str | None = option(
        None, "a TOML file with the tenants, their API keys' hashes and limits; without it there are no keys"
    )
    allow_anonymous: bool = option(
        default=False, text="without --tenants: listen also where other machines reach the router"
    )
    runner: str = option("torch", "the model runner; fake needs no model weights", choices=("torch", "fake"))
    tp: int = option(1, "processes of each worker that compute the model together, each a part of its heads")
    pp: int = option(1, "processes of each worker that compute the model together, each some of its layers")
    threads: int = option(0, "compute threads of each worker; 0 shares the cores out")
    lend_cores: bool = option(
        default=True, text="workers compute on each other's cores while those have nothing to do"
    )
    log_dir: str | None = option(
        None, "keep the processes' logs here; without it they go when the cluster goes"
    )
    startup_timeout_s: float = option(180.0, "give up when the cluster is not ready by then")
    grace_s: float = option(
        35.0, "how long a process may drain at the end before it is killed; services drain 30"
    )

    def __post_init__(self) -> None:
        topology = self.shape
        if self.disaggregate == "always" and topology.num_prefill == 0:
            raise ConfigError(f"--disaggregate always needs a prefill worker, and --topology is {topology}")
        check_serving(self)
        if self.redis:
            parse_redis_url(self.redis)
        self._check_ports()
        check_open(
            f"{self.host}:{self.port}",
            self.tenants,
            allow_anonymous=self.allow_anonymous,
            asks_for_certificate=self.public_tls.check() and bool(self.tls_client_ca),
        )
        if self.threads < 0:
            raise ConfigError(f"--threads {self.threads} is negative; 0 shares the cores out")
        if self.startup_timeout_s <= 0 or self.grace_s <= 0:
            raise ConfigError("--startup-timeout-s and --grace-s must be more than 0")

    def _check_ports(self) -> None:
        if not 1 <= self.routers <= _MAX_ROUTERS:
            raise ConfigError(f"--routers {self.routers} is not between 1 and {_MAX_ROUTERS}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not between 0 and 65535")
        if self.port + self.routers - 1 > 65535:
            raise ConfigError(f"--port {self.port} leaves too few ports for {self.routers} routers")
        check_metrics_port(self.metrics_port)
        num_processes = self.routers + self.shape.num_workers
        if self.metrics_port + num_processes - 1 > 65535:
            raise ConfigError(
                f"--metrics-port {self.metrics_port} leaves too few ports for {num_processes} routers and workers"
            )

    @property
    def shape(self) -> Topology:
        return Topology.parse(self.topology)

    @property
    def public_tls(self) -> TlsFiles:
        """What the router's clients see of TLS."""
        return TlsFiles(
            self.tls_cert or "", self.tls_key or "", self.tls_client_ca or "", "--tls", "--tls-client-ca"
        )

    @property
    def threads_per_worker(self) -> int:
        """Every core has one owner: two workers that share one slow each other down several times over."""
        return self.threads or max(1, usable_cores() // self.shape.num_workers)

    @property
    def lends_cores(self) -> bool:
        """Where each has cores of its own, and nothing depends on the number of threads."""
        is_shared_out = not self.threads and 1 < self.shape.num_workers <= usable_cores()
        return self.lend_cores and is_shared_out and self.runner == "torch" and self.exactness == "fast"

    def kv_bytes_per_worker(self, free_bytes: int, weights_bytes: int) -> int:
        """Equal shares of the cluster's one budget, where `free_bytes` are free before anything is started.

        Raises ConfigError for a budget that does not fit beside each worker's weights. Memory is taken as it is first used:
        a cluster that takes more than there is would run well, and be killed in the middle of it.
        """
        budget = MemorySize.parse(self.kv_memory, "--kv-memory").of(free_bytes)
        left = max(0, free_bytes - self.shape.num_workers * weights_bytes)
        if budget > left:
            raise ConfigError(
                f"--kv-memory {self.kv_memory}: {shown_bytes(budget)} of KV cache are more than the {shown_bytes(left)} of memory "
                f"that are free beside the weights of {self.shape.num_workers} workers; lower it"
            )
        return max(1, budget // self.shape.num_workers)


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def needs_salt(config: UpConfig) -> bool:
    """Whether routers have to be given a secret in common: with one each, a tenant would not find through one what it has from another."""
    if config.routers == 1 or not config.tenants:
        return False
    return not (config.config and "cache_salt_file" in _read(Path(config.config)).get("router", {}))
