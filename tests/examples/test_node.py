"""The Node example, installed as its reader would install it."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.examples.clients import REFUSED
from tests.fake_inference import ENDLESS, FULL, FakeInference


async def _run(node_example: Path, *args: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        "node", node_example / "generate.mjs", *args, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_example_streams_an_answer(node_example: Path, fake_inference: FakeInference) -> None:
    """Text goes to stdout, the finish and its usage to stderr, and the process ends by itself."""
    status, out, err = await _run(node_example, "--address", fake_inference.address, "one two")
    assert (status, out) == (0, "one two")
    assert err == "\nFINISH_REASON_STOP: 2 tokens, 2 cached, prefill-0 -> decode-0\n"


async def test_the_example_shows_a_refusal(node_example: Path, fake_inference: FakeInference) -> None:
    """Message, reason, facts and when to come again are on stderr, and the exit status is 1."""
    answer = await _run(node_example, "--address", fake_inference.address, FULL)
    assert answer == (1, "", REFUSED)


async def test_the_example_sends_the_key_of_the_environment(
    node_example: Path, fake_inference: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACELINE_API_KEY goes with the call."""
    monkeypatch.setenv("PACELINE_API_KEY", "paceline-key")
    await _run(node_example, "--address", fake_inference.address, "one")
    assert fake_inference.keys == ["Bearer paceline-key"]


async def test_ctrl_c_cancels_on_the_server(node_example: Path, fake_inference: FakeInference) -> None:
    """SIGINT ends the call, and the server's handler is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *("node", node_example / "generate.mjs", "--address", fake_inference.address, ENDLESS),
        stdout=PIPE,
        stderr=PIPE,
    )
    assert process.stdout is not None
    await process.stdout.readuntil(ENDLESS.encode())
    process.send_signal(2)
    _, err = await process.communicate()
    await fake_inference.cancelled.wait()
    assert (process.returncode, err) == (130, b"\ncancelled\n")


def test_the_lock_file_names_no_host() -> None:
    """Packages are found by name and hash, on whatever registry the reader uses."""
    lock = (ROOT / "examples" / "node" / "package-lock.json").read_text(encoding="utf-8")
    assert '"integrity"' in lock
    assert '"resolved"' not in lock
