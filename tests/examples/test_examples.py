"""The Python and grpcurl examples, run as their readers would run them."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from tests.fake_inference import TOO_LONG, FakeInference

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
    answer = await _run(sys.executable, script, "one two", fake_inference.address)
    assert answer == (0, "one two", "\n2 tokens, 2 cached, prefill-0 -> decode-0\n")


async def test_python_shows_an_error(fake_inference: FakeInference) -> None:
    """A refusal is one line on stderr and exit 1."""
    script = ROOT / "examples" / "python" / "generate.py"
    status, out, err = await _run(sys.executable, script, TOO_LONG, fake_inference.address)
    assert (status, out) == (1, "")
    assert err.endswith("(PROMPT_TOO_LONG)\n")


async def test_grpcurl_calls_every_method(fake_inference: FakeInference) -> None:
    """The script works against reflection alone, whatever characters the prompt holds."""
    script = ROOT / "examples" / "grpcurl.sh"
    status, out, err = await _run(script, 'say "ü"', fake_inference.address)
    assert (status, err) == (0, "")
    assert '"fake-model"' in out
    assert f"{ord('s')},\n" in out  # a token id of Tokenize
    assert '"text": " \\"ü\\""' in out
    assert fake_inference.requests[0].chat.messages[0].content == 'say "ü"'
