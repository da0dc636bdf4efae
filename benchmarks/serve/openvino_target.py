"""OpenVINO GenAI as a target: its pipeline in a process of its own, behind a pipe.

It is no server. A thread of this process would do, but the pipeline and the load's clock would then wait for each other's turn of
the interpreter, and its memory would be this process's too.
"""

import asyncio
import importlib.util
import json
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from benchmarks.serve.peers import OpenVinoPeer
from benchmarks.serve.processes import StartedProcess, started
from benchmarks.serve.targets import TIMEOUT_S, RefusedError
from paceline.core.errors import ConfigError

_CHILD = "benchmarks.serve.openvino_child"
_MISSING = "OpenVINO GenAI is not installed here: pip install -c constraints.txt -e '.[openvino]'"


class OpenVinoTarget:
    """The pipeline of a process that `openvino_target` has started."""

    def __init__(self, name: str, child: StartedProcess) -> None:
        self.name = name
        self._child = child
        self._answers: dict[int, asyncio.Queue[dict[str, Any]]] = {}
        self._num_asked = 0
        self._gone = ""

    async def answer(
        self, prompt_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """See Target.answer."""
        if self._gone:
            raise RefusedError(self._gone)
        self._num_asked += 1
        number, answers = self._num_asked, asyncio.Queue[dict[str, Any]]()
        self._answers[number] = answers
        try:
            await self._ask(
                {"id": number, "prompt_ids": list(prompt_ids), "num_output_tokens": num_output_tokens}
            )
            is_over = False
            while not is_over:
                part = await _next_of(answers)
                if "refused" in part:
                    raise RefusedError(part["refused"])
                is_over = part["ended"]
                if part["token_ids"]:
                    yield tuple(part["token_ids"])
        finally:
            del self._answers[number]

    async def _ask(self, request: dict[str, Any]) -> None:
        stdin = self._child.process.stdin
        assert stdin is not None, "it is started with pipes"
        try:
            stdin.write(json.dumps(request).encode() + b"\n")
            await stdin.drain()
        except ConnectionError as error:
            raise RefusedError(f"its process has ended: {self._child.last_words()}") from error

    async def read_answers(self) -> None:
        """Gives each line to whom it is for, until the process ends; then nobody waits any more."""
        stdout = self._child.process.stdout
        assert stdout is not None, "it is started with pipes"
        async for line in stdout:
            part = json.loads(line)
            if "unable" in part:
                self._gone = part["unable"]
            elif part["id"] in self._answers:
                self._answers[part["id"]].put_nowait(part)
        self._gone = self._gone or f"its process has ended: {self._child.last_words()}"
        for answers in self._answers.values():
            answers.put_nowait({"refused": self._gone})


async def _next_of(answers: "asyncio.Queue[dict[str, Any]]") -> dict[str, Any]:
    try:
        return await asyncio.wait_for(answers.get(), TIMEOUT_S)
    except TimeoutError as error:
        raise RefusedError(f"it was silent for {TIMEOUT_S:.0f} s") from error


def require_openvino() -> None:
    """Raises ConfigError where it is not installed."""
    if importlib.util.find_spec("openvino_genai") is None:
        raise ConfigError(f"--against openvino: {_MISSING}")


@asynccontextmanager
async def openvino_target(peer: OpenVinoPeer) -> AsyncIterator[tuple[OpenVinoTarget, StartedProcess]]:
    """The pipeline, which may still load its model, and its process."""
    settings = json.dumps(dict(peer.settings))
    command = (sys.executable, "-P", "-m", _CHILD, str(peer.directory), settings)
    async with started(command, piped=True) as child:
        target = OpenVinoTarget(peer.name, child)
        reading = asyncio.create_task(target.read_answers())
        try:
            yield target, child
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
