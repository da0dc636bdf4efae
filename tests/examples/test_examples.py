"""The Python and grpcurl examples, run as their readers would run them."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.examples.clients import REFUSED
from tests.fake_inference import ENDLESS, FULL, FakeInference

ROOT = Path(__file__).parents[2]


async def _run(*command: str | Path) -> tuple[int | None, str, str]:
    # grpcurl is installed beside the Python that runs the tests.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": path}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, cwd=ROOT, env=env)
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_python_streams_an_answer(fake_inference: FakeInference) -> None:
    """Text goes to stdout, and a line about the answer to stderr."""
    script = ROOT / "examples" / "python" / "generate.py"
    answer = await _run(sys.executable, script, "--address", fake_inference.address, "one two")
    assert answer == (0, "one two", "\nFINISH_REASON_STOP: 2 tokens, 2 cached, prefill-0 -> decode-0\n")


async def test_python_shows_a_refusal(fake_inference: FakeInference) -> None:
    """Message, reason, facts and when to come again are on stderr, and the exit status is 1."""
    script = ROOT / "examples" / "python" / "generate.py"
    status, out, err = await _run(sys.executable, script, "--address", fake_inference.address, FULL)
    assert (status, out) == (1, "")
    assert err == REFUSED


async def test_python_cancels_on_ctrl_c(fake_inference: FakeInference) -> None:
    """SIGINT ends the call, and the server's handler is cancelled."""
    script = ROOT / "examples" / "python" / "generate.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, script, "--address", fake_inference.address, ENDLESS, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    await process.stdout.readuntil(ENDLESS.encode())
    process.send_signal(signal.SIGINT)
    _, err = await process.communicate()
    await fake_inference.cancelled.wait()
    assert (process.returncode, err) == (130, b"\ncancelled\n")


async def test_python_sends_the_key_of_the_environment(
    fake_inference: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACELINE_API_KEY goes with the call."""
    monkeypatch.setenv("PACELINE_API_KEY", "paceline-key")
    script = ROOT / "examples" / "python" / "generate.py"
    await _run(sys.executable, script, "--address", fake_inference.address, "one")
    assert fake_inference.keys == ["Bearer paceline-key"]


async def test_grpcurl_calls_every_method(fake_inference: FakeInference) -> None:
    """The script works against reflection alone, whatever characters the prompt holds."""
    script = ROOT / "examples" / "grpcurl.sh"
    status, out, err = await _run(script, 'say "ü"', fake_inference.address)
    assert (status, err) == (0, "")
    assert '"fake-model"' in out
    assert f"{ord('s')},\n" in out  # a token id of Tokenize
    assert '"text": " \\"ü\\""' in out
    assert fake_inference.requests[0].chat.messages[0].content == 'say "ü"'
