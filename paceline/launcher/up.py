"""`./run up`: finds the model, brings a cluster up, says how to call it, and takes it down on Ctrl-C."""

import asyncio
import signal
import sys
import time
from collections.abc import Sequence

from paceline.core.errors import PacelineError
from paceline.launcher.capacity import capacity_lines
from paceline.launcher.cluster import LocalCluster
from paceline.launcher.config import UpConfig
from paceline.launcher.layout import metrics_ports, router_ports
from paceline.launcher.models import has_chat_template, resolve_model
from paceline.runtime.config import load_config


def _stop_signals() -> list[signal.Signals]:
    """What ends us; under nohup a closed terminal does not."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hang_up]


def up(argv: Sequence[str]) -> int:
    """Runs a cluster until it is told to stop. Gives the exit status: 0, or 1 after one line on stderr."""
    config = load_config(
        UpConfig, argv, prog="./run up", section="up", about="Run a cluster on this machine."
    )
    try:
        return _run(config)
    except PacelineError as error:
        sys.stderr.write(f"./run up: error: {error}\n")
        return 1
    except KeyboardInterrupt:
        _say("stopped")
        return 0


def _run(config: UpConfig) -> int:
    started = time.monotonic()
    # Until the event loop runs, every signal to stop ends whatever is being done.
    for number in _stop_signals():
        signal.signal(number, signal.default_int_handler)
    # Known at once, and not after a download.
    router_ports(config)
    metrics_ports(config)
    model = resolve_model(config.model, _say)
    return asyncio.run(_until_told(LocalCluster(config, model, say=_say), config, started))


async def _until_told(cluster: LocalCluster, config: UpConfig, started: float) -> int:
    """Serve until a signal; the first lets everything drain, the second kills."""
    serving = asyncio.create_task(_serve(cluster, config, started))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        _say("stopping; once more to kill")
        serving.cancel()

    for number in _stop_signals():
        loop.add_signal_handler(number, stop)
    try:
        await serving
    except asyncio.CancelledError:
        _say("stopped")
    return 0


async def _serve(cluster: LocalCluster, config: UpConfig, started: float) -> None:
    async with cluster:
        # Asked before anybody hears of "ready": a channel that is open when its server stops says so on our stderr.
        held = await capacity_lines(cluster.worker_addresses, cluster.channels())
        took_s = time.monotonic() - started
        _say(
            f"ready: {', '.join(cluster.router_addresses)}, {config.model}, {config.shape}, after {took_s:.1f} s"
        )
        metrics = [
            f"  metrics of {name}: http://{at}/metrics" for name, at in cluster.metrics_addresses.items()
        ]
        _say("\n".join([*held, *metrics, ""]))
        has_template = has_chat_template(cluster.layout.model)
        _say(_how_to_call(cluster.address, has_template=has_template, has_tls=config.public_tls.check()))
        raise await cluster.until_lost()


def _how_to_call(address: str, *, has_template: bool, has_tls: bool) -> str:
    port = address.rpartition(":")[2]
    flag = "" if port == "50051" else f" --address {address}"
    flag += " --tls-ca CA.pem" if has_tls else ""
    plain = "-cacert CA.pem" if has_tls else "-plaintext"
    ask = f"""\
  ./run generate{flag} "What is the capital of France?"
  ./run chat{flag}"""
    # A base model knows no conversation.
    go_on = f'  ./run generate{flag} --raw "Once upon a time"'
    return f"""\
{ask if has_template else go_on}
  grpcurl {plain} -d '{{"text": "Once upon a time"}}' {address} paceline.v1.InferenceService/Generate

Ctrl-C stops everything."""


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
