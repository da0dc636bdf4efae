"""A whole cluster on this machine: Redis, workers and router as processes of their own.

`./run up` is a thin shell over `LocalCluster`, and tests use it as it is. It starts services and imports none.
"""

import contextlib
import os
import secrets
import signal
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.core.errors import ConfigError, ProcessLostError
from paceline.launcher.commands import redis_command, router_command, worker_command
from paceline.launcher.config import UpConfig, require_free_sections, usable_cores
from paceline.launcher.layout import Layout, metrics_ports, router_ports
from paceline.launcher.probes import answering, require_redis, serving
from paceline.launcher.process import ProcessSpec
from paceline.launcher.supervisor import RestartPolicy, Say, Supervisor
from paceline.runtime.channels import Channels
from paceline.runtime.cores import create_cores_file
from paceline.runtime.membership import Membership, read_token
from paceline.runtime.memory import free_memory_bytes
from paceline.runtime.private_dir import private_dir
from paceline.runtime.processor import resolve_dtype

# A unix socket's path may have 107 bytes; a deep TMPDIR leaves too few for ours.
_MAX_TEMP_PATH = 70
_SECRET_BYTES = 32
# Turns in which a thread waits for the next piece of a step before it sleeps; some tens of microseconds. By itself it would
# go on for milliseconds, on a core that others have meanwhile.
_SPIN_COUNT = "10000"
# Weights lie in large pages, as far as the system has them: a product of few rows does little but read them.
_TUNABLES = "glibc.malloc.hugetlb=1"


# --- what to start: decided here, done by the supervisor ----------------------------------------------------


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
            env={"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": _SPIN_COUNT, "GLIBC_TUNABLES": _TUNABLES},
        )
        for worker in (*layout.prefill, *layout.decode)
    ]
    routers = [
        ProcessSpec(
            router, router_command(layout, router), serving(layout.probed_router_address(router)), vital=True
        )
        for router in layout.routers
    ]
    return [*([] if layout.config.redis else [[redis]]), workers, routers]


# --- the cluster -------------------------------------------------------------------------------------------


class LocalCluster:
    """A cluster that serves inside `async with`, and of which nothing is left afterwards.

    Processes are called redis, prefill-0, ..., decode-0, ... and router, or router-0, ... One that dies is started again as
    `policy` says. Cancel `stop` to kill instead of drain. Who relays connections to the workers, to disturb them,
    does so on a socket NAME.sock of `relay_dir` for each.
    """

    def __init__(
        self,
        config: UpConfig,
        model: Path,
        *,
        say: Say = lambda _: None,
        policy: RestartPolicy | None = None,
        relay_dir: Path | None = None,
    ) -> None:
        self._config = config
        self._model = model
        self._say = say
        self._policy = policy
        self._relay_dir = relay_dir
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
        ports = router_ports(config)
        if config.redis:
            await require_redis(config.redis)
        try:
            run_dir = self._run_dir.enter_context(_run_dir())
            on_gpus = may_use_gpus(config.device)
            weights_bytes = 0 if on_gpus else _weights_bytes(self._model, resolve_dtype(config.dtype))
            kv_bytes = config.kv_bytes_per_worker(free_memory_bytes(), weights_bytes)
            self._layout = Layout(
                config, self._model, run_dir, ports, kv_bytes, metrics_ports(config), self._relay_dir
            )
            _make_log_dir(self._layout.log_dir)
            # Nobody else can enter its directory.
            self._layout.redis_file.write_text(self._layout.redis_url, encoding="utf-8")
            _write_secret(self._layout.token_file, secrets.token_hex(_SECRET_BYTES))
            _write_secret(self._layout.salt_file, secrets.token_hex(_SECRET_BYTES))
            create_cores_file(self._layout.cores_file, usable_cores())
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
        """host:port of the first router, for a client on this machine."""
        return self.router_addresses[0]

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """The same of every router."""
        return tuple(map(self.layout.local_router_address, self.layout.routers))

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
        """Return when the routers died too often to be started again."""
        return await self._running.until_lost()

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill one process, as a test of what the others do."""
        self._running.kill(name, number)

    @property
    def _running(self) -> Supervisor:
        assert self._supervisor is not None, "start it first"
        return self._supervisor


def may_use_gpus(device: str, driver: Path = Path("/proc/driver/nvidia/gpus")) -> bool:
    """Whether weights may go to GPUs, and not into this machine's memory. Only workers, which have torch, find out for sure."""
    return device.startswith("cuda") or (device == "auto" and driver.is_dir())


def _weights_bytes(model: Path, dtype: str) -> int:
    """What a worker's copy of the weights takes, more or less: files nearly always hold 16 bits a weight."""
    num_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    return 2 * num_bytes if dtype == "float32" else num_bytes


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
