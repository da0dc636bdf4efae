"""Processes that die at start, die later, will not end, or lose their launcher."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from paceline.core.errors import ProcessLostError
from paceline.launcher.process import Probe, ProcessSpec
from paceline.launcher.supervisor import RestartPolicy, Supervisor
from paceline.runtime.tether import tethered

# Each says that it is ready by making the file it is given.
_SERVES = "import pathlib, signal, sys; pathlib.Path(sys.argv[1]).touch(); signal.pause()"
_STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + _SERVES
_DIES = "import sys; print('loading'); sys.exit('Error: no such model')"
_DIES_SOON = "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); sys.exit(7)"
_HANGS = "import signal; signal.pause()"

_QUICK = RestartPolicy(max_attempts=3, first_delay_s=0.01, max_delay_s=0.02)


class _Bench:
    """A supervisor, what it said, and specs of Python one-liners for it."""

    def __init__(self, directory: Path, policy: RestartPolicy) -> None:
        self.said: list[str] = []
        self.directory = directory
        self.supervisor = Supervisor(directory, say=self.said.append, policy=policy)

    def spec(self, name: str, code: str, *, vital: bool = False) -> ProcessSpec:
        mark = self.directory / f"{name}.ready"
        command = (sys.executable, "-I", "-S", "-c", code, str(mark))
        return ProcessSpec(name, command, _exists(mark), vital=vital)


def _exists(mark: Path) -> Probe:
    async def probe() -> bool:
        return mark.exists()

    return probe


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[_Bench]:
    """A supervisor that is stopped at the end, and must have left nothing."""
    bench = _Bench(tmp_path, _QUICK)
    yield bench
    await bench.supervisor.stop(grace_s=5)
    assert bench.supervisor.pids == {}
    assert not psutil.Process().children(recursive=True)


async def test_a_stage_is_up_when_all_of_it_is_ready(bench: _Bench) -> None:
    """Start returns with every process running and ready."""
    await bench.supervisor.start([bench.spec("a", _SERVES), bench.spec("b", _SERVES)], timeout_s=10)
    assert bench.supervisor.pids.keys() == {"a", "b"}
    assert bench.supervisor.ready


async def test_a_death_at_start_names_its_reason(bench: _Bench) -> None:
    """A process that dies at start is reported with its name, its status and the last error in its log."""
    stage = [bench.spec("good", _HANGS), bench.spec("bad", _DIES)]
    with pytest.raises(ProcessLostError) as caught:
        await bench.supervisor.start(stage, timeout_s=10)
    assert str(caught.value) == "bad exited with status 1: Error: no such model"
    assert caught.value.process == "bad"


async def test_a_death_in_an_earlier_stage_is_noticed(bench: _Bench) -> None:
    """While a stage comes up, the processes of the stages before it are watched too."""
    await bench.supervisor.start([bench.spec("first", _SERVES)], timeout_s=10)
    second = asyncio.create_task(bench.supervisor.start([bench.spec("second", _HANGS)], timeout_s=10))
    bench.supervisor.kill("first")
    with pytest.raises(ProcessLostError, match=r"^first was killed by SIGKILL"):
        await second


async def test_waiting_for_readiness_has_an_end(bench: _Bench) -> None:
    """A process that is never ready is given up after the time limit."""
    with pytest.raises(ProcessLostError, match="slow is not ready after 0 s"):
        await bench.supervisor.start([bench.spec("slow", _HANGS)], timeout_s=0.2)


async def test_a_process_that_dies_is_started_again(bench: _Bench) -> None:
    """After ready, a death is reported in one line and mended, and the others keep their processes."""
    await bench.supervisor.start([bench.spec("a", _SERVES), bench.spec("b", _SERVES)], timeout_s=10)
    bench.supervisor.guard()
    before = bench.supervisor.pids
    bench.supervisor.kill("a")
    assert not bench.supervisor.ready
    await bench.supervisor.until_ready()
    after = bench.supervisor.pids
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    assert sum("a was killed by SIGKILL" in line for line in bench.said) == 1


async def test_restarting_has_an_end(bench: _Bench) -> None:
    """A vital process that keeps dying is started again as often as the policy says, then given up."""
    await bench.supervisor.start([bench.spec("a", _SERVES, vital=True)], timeout_s=10)
    bench.supervisor._processes["a"].spec = bench.spec("a", _DIES_SOON, vital=True)
    bench.supervisor.guard()
    bench.supervisor.kill("a")
    lost = await bench.supervisor.until_lost()
    assert str(lost).startswith("a exited with status 7")
    assert sum("starting it again" in line for line in bench.said) == 3


async def test_one_vital_process_of_two_is_enough(bench: _Bench) -> None:
    """Only when the last of them is given up is the cluster of no use."""
    names = ("a", "b")
    await bench.supervisor.start([bench.spec(name, _SERVES, vital=True) for name in names], timeout_s=10)
    for name in names:
        bench.supervisor._processes[name].spec = bench.spec(name, _DIES_SOON, vital=True)
    bench.supervisor.guard()
    lost = asyncio.create_task(bench.supervisor.until_lost())
    bench.supervisor.kill("a")
    async with asyncio.timeout(60):
        while not any("it is not started again" in line for line in bench.said):  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0)
    assert (lost.done(), set(bench.supervisor.pids)) == (False, {"b"})
    bench.supervisor.kill("b")
    assert str(await lost).startswith("b exited with status 7")


async def test_a_restart_that_cannot_be_is_not_silent(bench: _Bench) -> None:
    """When a process cannot even be started again, whoever waits for the cluster's end is told."""
    await bench.supervisor.start([bench.spec("a", _SERVES)], timeout_s=10)
    bench.supervisor._log_dir = bench.directory / "gone"
    bench.supervisor.guard()
    bench.supervisor.kill("a")
    with pytest.raises(FileNotFoundError):
        await bench.supervisor.until_lost()


async def test_what_does_not_end_is_killed(bench: _Bench) -> None:
    """A process that ignores SIGTERM is killed when the grace period is over."""
    await bench.supervisor.start([bench.spec("deaf", _STUBBORN)], timeout_s=10)
    await bench.supervisor.stop(grace_s=0.1)
    assert bench.supervisor.pids == {}


async def test_a_cancelled_stop_kills_at_once(bench: _Bench) -> None:
    """Cancelling a stop that waits for a drain leaves nothing running."""
    await bench.supervisor.start([bench.spec("deaf", _STUBBORN)], timeout_s=10)
    stopping = asyncio.create_task(bench.supervisor.stop(grace_s=60))
    await asyncio.wait([stopping], timeout=0.1)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert bench.supervisor.pids == {}


async def test_the_last_stage_stops_first(bench: _Bench) -> None:
    """A later stage has ended before an earlier one is asked to."""
    says_when = (
        "import pathlib, signal, sys, time; mark = pathlib.Path(sys.argv[1]);"
        "signal.signal(signal.SIGTERM, lambda *_: (mark.with_suffix('.end').write_text(str(time.monotonic_ns())),"
        "sys.exit()));mark.touch(); signal.pause()"
    )
    for name in ("first", "second"):
        await bench.supervisor.start([bench.spec(name, says_when)], timeout_s=10)
    await bench.supervisor.stop(grace_s=10)
    first, second = (int((bench.directory / f"{name}.end").read_text()) for name in ("first", "second"))
    assert second < first


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_a_killed_launcher_leaves_no_orphan() -> None:
    """What was started on a tether ends when the process that started it is killed."""
    child = tethered([sys.executable, "-I", "-S", "-c", _HANGS], signal=signal.SIGTERM)
    # `tethered` names the process that calls it; here the parent is another one.
    child[4] = "PARENT"
    launcher = (
        "import os, signal, subprocess, sys;"
        "command = [str(os.getpid()) if part == 'PARENT' else part for part in sys.argv[1:]];"
        "print(subprocess.Popen(command).pid, flush=True); signal.pause()"
    )
    parent = subprocess.Popen([sys.executable, "-I", "-S", "-c", launcher, *child], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        orphan = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    _gone, alive = psutil.wait_procs([orphan], timeout=10)
    assert not alive


def test_delays_double_up_to_a_limit() -> None:
    """Each attempt waits twice as long as the one before, up to the limit."""
    policy = RestartPolicy(first_delay_s=0.5, max_delay_s=3)
    assert [policy.delay_s(attempt) for attempt in (1, 2, 3, 4)] == [0.5, 1.0, 2.0, 3.0]
