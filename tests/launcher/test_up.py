"""The command `up`, as a user meets it: its lines, its exit status, and what it leaves behind."""

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.certificates import Authority

Up = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def up(stand_ins: None, model_dir: Path) -> Iterator[Up]:
    """Starts `up` with stand-in services."""
    started: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> "subprocess.Popen[str]":
        defaults = ("--model", str(model_dir), "--port", "0", "--grace-s", "5")
        command = [sys.executable, "-P", "-m", "paceline.launcher", "up", *defaults, *flags]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def _until(process: "subprocess.Popen[str]", start: str) -> str:
    """The first line of its output that begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(start):
            return line
    raise AssertionError(f"no line {start!r}; stderr: {process.stderr.read() if process.stderr else ''}")


def _descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def _all_gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=10)[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything_with_status_0(up: Up, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM on a ready cluster stops every process, says so, and exits with 0."""
    process = up()
    ready = _until(process, "ready: 127.0.0.1:")
    assert "1P1D" in ready
    children = _descendants(process)
    assert len(children) == 4
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert out.endswith("stopped\n")
    assert _all_gone(children)


def test_it_says_how_to_call_over_tls(up: Up, tmp_path: Path) -> None:
    """The commands have a CA, which the user knows."""
    pair = Authority(tmp_path).issue("router")
    process = up("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    _until(process, "ready: ")
    assert " --tls-ca CA.pem " in _until(process, "  ./run generate")
    _until(process, "  grpcurl -cacert CA.pem ")


def test_it_says_how_to_call(up: Up) -> None:
    """After ready come the commands that send a request."""
    process = up()
    _until(process, "ready: ")
    assert "./run generate" in _until(process, "  ./run generate")
    _until(process, "  grpcurl -plaintext")


def test_it_says_where_each_router_is(up: Up) -> None:
    """All addresses stand in the line that says ready, and somebody listens on each."""
    process = up("--routers", "2")
    addresses = re.findall(r"127\.0\.0\.1:(\d+)", _until(process, "ready:"))
    assert len(set(addresses)) == 2
    for port in addresses:
        socket.create_connection(("127.0.0.1", int(port)), timeout=10).close()


def test_it_says_what_it_holds(up: Up) -> None:
    """Each worker's blocks, tokens and requests come after ready, and the longest request where it was lowered."""
    process = up("--kv-memory", "8GiB", "--max-model-len", "1000")
    _until(process, "ready: ")
    for worker in ("prefill-0", "decode-0"):
        line = _until(process, f"  {worker}: ")
        assert "4,096 KV blocks (4 GiB), 10,000 tokens, 4 requests of 1,000 at once" in line
    assert "1,000 tokens, prompt and output together; the model could take 8,192" in _until(
        process, "  longest"
    )


@pytest.mark.thorough
def test_it_says_where_the_metrics_are(up: Up) -> None:
    """An address for each process comes with ready; without metrics there is no such line."""
    process = up()
    _until(process, "ready: ")
    for name in ("router", "prefill-0", "decode-0"):
        line = _until(process, "  metrics of ")
        assert re.fullmatch(rf"  metrics of {name}: http://127\.0\.0\.1:\d+/metrics\n", line)
    silent = up("--metrics-port", "-1")
    assert silent.stdout is not None
    lines = itertools.takewhile(lambda line: not line.startswith("Ctrl-C"), silent.stdout)
    assert not [line for line in lines if "metrics of" in line]


def test_a_signal_while_starting_ends_it_too(up: Up) -> None:
    """Ctrl-C before ready also stops what runs already and exits with 0."""
    process = up("--startup-timeout-s", "60")
    _until(process, "starting prefill-0")
    children = _descendants(process)
    process.send_signal(signal.SIGINT)
    _out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "")
    assert _all_gone(children)


@pytest.mark.thorough
def test_a_second_signal_kills(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a worker ignores the request to end, a second Ctrl-C ends it at once."""
    monkeypatch.setenv("STAND_IN_decode-0", "stubborn")
    process = up("--grace-s", "100")
    _until(process, "ready: ")
    children = _descendants(process)
    process.send_signal(signal.SIGINT)
    _until(process, "stopping")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
    assert _all_gone(children)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.thorough
def test_a_killed_launcher_leaves_no_orphan(up: Up) -> None:
    """SIGKILL on the launcher ends router, workers and Redis too."""
    process = up()
    _until(process, "ready: ")
    children = _descendants(process)
    process.kill()
    assert _all_gone(children)


@pytest.mark.thorough
def test_a_death_after_ready_is_reported_and_mended(up: Up) -> None:
    """A killed worker gives one line and comes back."""
    process = up()
    _until(process, "ready: ")
    worker = next(child for child in _descendants(process) if "decode-0" in child.cmdline())
    os.kill(worker.pid, signal.SIGKILL)
    assert "starting it again" in _until(process, "decode-0 was killed by SIGKILL")
    _until(process, "decode-0 is ready")


def _fails(process: "subprocess.Popen[str]") -> str:
    """The one line on stderr of a command that must fail."""
    _out, err = process.communicate(timeout=60)
    assert process.returncode not in {0, None}
    assert err.count("\n") == 1
    return err


def test_a_worker_that_dies_at_start_is_one_line(up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line has the worker's name, its status and the last error it logged."""
    monkeypatch.setenv("STAND_IN_prefill-0", "dies")
    assert "prefill-0 exited with status 3: error: no room for the KV cache" in _fails(up())


def test_a_busy_port_is_one_line(up: Up) -> None:
    """A port that is taken is named."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        assert f"port {port} on 127.0.0.1 is in use" in _fails(up("--port", port))


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--topology", "1P0D"), "somebody must decode"),
        (("--model", "/no/such/model"), "no such directory"),
        (("--redis", "redis://127.0.0.1:1"), "no Redis answers"),
        (("--dtype", "int3"), "invalid choice"),
        (("--kv-memory", "lots"), "--kv-memory 'lots' is no amount of memory"),
        (("--max-model-len", "-1"), "is negative"),
        (("--config", "/no/such.toml"), "cannot read the config file"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(up: Up, flags: tuple[str, ...], why: str) -> None:
    """A wrong setting ends the command with one line that says which and why."""
    assert why in _fails(up(*flags))
