"""The Node example, installed as its reader would install it."""

import asyncio
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.conftest import ROOT
from tests.fake_inference import ENDLESS, TOO_LONG, FakeInference


async def _run(node_example: Path, *args: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        "node", node_example / "generate.mjs", *args, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_example_streams_an_answer(node_example: Path, fake_inference: FakeInference) -> None:
    """Text goes to stdout, the finish and its usage to stderr, and the process ends by itself."""
    status, out, err = await _run(node_example, "one two", fake_inference.address)
    assert (status, out) == (0, "one two")
    assert err == "\nFINISH_REASON_STOP: 2 tokens, 2 cached, prefill-0 -> decode-0\n"


async def test_the_example_shows_an_error(node_example: Path, fake_inference: FakeInference) -> None:
    """A refusal is one line on stderr and exit 1."""
    status, out, err = await _run(node_example, TOO_LONG, fake_inference.address)
    assert (status, out) == (1, "")
    assert err.endswith("shorten it (INVALID_ARGUMENT)\n")


async def test_ctrl_c_cancels_on_the_server(node_example: Path, fake_inference: FakeInference) -> None:
    """SIGINT ends the call, and the server's handler is cancelled."""
    process = await asyncio.create_subprocess_exec(
        "node", node_example / "generate.mjs", ENDLESS, fake_inference.address, stdout=PIPE, stderr=PIPE
    )
    assert process.stdout is not None
    await process.stdout.readuntil(ENDLESS.encode())
    process.send_signal(2)
    await process.communicate()
    await fake_inference.cancelled.wait()
    assert process.returncode == 1


def test_the_lock_file_names_no_host() -> None:
    """Packages are found by name and hash, on whatever registry the reader uses."""
    lock = (ROOT / "examples" / "node" / "package-lock.json").read_text(encoding="utf-8")
    assert '"integrity"' in lock
    assert '"resolved"' not in lock
