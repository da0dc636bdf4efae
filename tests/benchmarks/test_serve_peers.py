"""The servers that `./run bench serve` puts beside ours: what names them, how they are asked, started and ended."""

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from benchmarks.serve import command
from benchmarks.serve.openvino_target import openvino_target
from benchmarks.serve.peers import CompletionsPeer, OpenVinoPeer, peers_of
from benchmarks.serve.processes import started
from benchmarks.serve.servers import peer_server, require_peers
from benchmarks.serve.targets import (
    CompletionsTarget,
    RefusedError,
    completions_target,
    http_client,
    require_answer,
)
from paceline.core.errors import ConfigError
from paceline.launcher.probes import free_port

# -- their names


def test_servers_are_named_by_what_they_are() -> None:
    """A completions API, one that is started, and OpenVINO with settings."""
    here = str(Path(__file__).parent)
    against = [
        "http://h:1/v1/",
        "vllm=http://h:2/v1",
        f"openvino:{here}",
        f"ov=openvino:{here}?cache_size=2&A_B=c",
    ]
    assert peers_of(against, ["vllm=serve 'a b' --port 2"]) == [
        CompletionsPeer("other", "http://h:1/v1"),
        CompletionsPeer("vllm", "http://h:2/v1", ("serve", "a b", "--port", "2")),
        OpenVinoPeer("openvino", Path(here)),
        OpenVinoPeer("ov", Path(here), (("cache_size", "2"), ("A_B", "c"))),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "127.0.0.1:8000",
        "a b=http://127.0.0.1/v1",
        "=http://127.0.0.1/v1",
        "paceline=http://127.0.0.1/v1",
        "openvino:",
        "openvino:/no/such/directory",
    ],
)
def test_a_server_s_name_and_address_are_checked(text: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match="--against"):
        peers_of([text], [])


@pytest.mark.parametrize("text", ["vllm=serve", "other=", "other='", "other"])
def test_a_command_starts_what_is_measured(text: str) -> None:
    """And is one."""
    with pytest.raises(ConfigError, match="--start"):
        peers_of(["http://h:1/v1"], [text])


def test_servers_have_names_of_their_own() -> None:
    """Two of one name would be one in the figures."""
    for against in (["http://h:1/v1"] * 2, ["vllm=http://h:1/v1", "vllm=http://h:2/v1"]):
        flags = [part for text in against for part in ("--against", text)]
        with pytest.raises(ConfigError, match="called"):
            command.main(["--address", "127.0.0.1:1", *flags])


# -- other servers


@asynccontextmanager
async def other_server(*events: object, status: str = "200 OK") -> AsyncIterator[str]:
    """An HTTP server that names a model, and answers each completion with these events; its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request, and the connection's end."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        if "/models" in head:
            body = json.dumps({"data": [{"id": "tiny"}]})
            writer.write(f"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{body}".encode())
        else:
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
            writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@asynccontextmanager
async def target_at(url: str) -> AsyncIterator[CompletionsTarget]:
    """The target of a server that runs."""
    async with http_client() as http:
        yield await completions_target(http, "theirs", url)


async def test_another_server_s_tokens_are_counted() -> None:
    """By their ids where it tells them; else each event with text is a token of no known id."""
    events = [
        {"choices": [{"text": "a", "token_ids": [5, 6]}]},
        {"choices": [{"text": "b"}]},
        {"choices": [{"text": ""}]},
        {"choices": [], "usage": {}},
    ]
    async with other_server(*events) as url, target_at(url) as target:
        assert target.name == "theirs"
        assert [part async for part in target.answer((1, 2), 3)] == [(5, 6), (-1,)]


async def test_tokens_whose_text_is_kept_back_are_counted() -> None:
    """A server that tells how many tokens there are so far leaves events out, and has no text in its last one."""
    events = [
        {"choices": [{"text": text}], "timings": {"predicted_n": number}}
        for text, number in (("a", 1), ("b", 4), ("", 5), ("", 5))
    ]
    async with other_server(*events) as url, target_at(url) as target:
        assert [part async for part in target.answer((1, 2), 5)] == [(-1,), (-1, -1, -1), (-1,)]


async def test_what_another_server_refuses_is_said() -> None:
    """With its own words."""
    async with (
        other_server({"error": "too long"}, status="400 Bad Request") as url,
        target_at(url) as target,
    ):
        with pytest.raises(RefusedError, match=r"answers 400: .*too long"):
            await anext(target.answer((1, 2), 3))
    with pytest.raises(ConfigError, match="does not say which model"):
        async with target_at(url):
            pass


async def test_a_server_s_first_answer_is_as_long_as_it_was_asked_for() -> None:
    """One that does as it likes could not be compared."""
    async with (
        other_server({"choices": [{"text": "a b", "token_ids": [5, 6]}]}) as url,
        target_at(url) as target,
    ):
        with pytest.raises(ConfigError, match="2 tokens where 1 is asked for"):
            await require_answer(target, url)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ([1], "no completion"),
        ("text", "no completion"),
        ({"choices": [7]}, "no completion"),
        ({"choices": {"a": 1}}, "no completion"),
    ],
)
async def test_a_failure_in_the_midst_of_an_answer_is_that_request_s(event: object, said: str) -> None:
    """A server that breaks down or talks otherwise ends nothing but the request."""
    events = [{"choices": [{"text": "a", "token_ids": [5]}]}, event]
    async with other_server(*events) as url, target_at(url) as target:
        answer = target.answer((1, 2), 3)
        assert await anext(answer) == (5,)
        with pytest.raises(RefusedError, match=said):
            await anext(answer)


# -- those that are started


SERVER = """
import http.server, json, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(json.dumps({"data": [{"id": "tiny"}]}))
    def do_POST(self):
        self.say('data: {"choices": [{"text": "a", "token_ids": [5]}]}\\n\\ndata: [DONE]\\n\\n')
    def say(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""


async def test_a_server_is_started_timed_and_ended() -> None:
    """Nothing of it is left, and a second one is not started beside it."""
    port = free_port("127.0.0.1", 0)
    peer = CompletionsPeer("theirs", f"http://127.0.0.1:{port}/v1", (sys.executable, "-c", SERVER, str(port)))
    async with peer_server(peer) as server:
        assert server.figures["start_to_first_answer_s"] > 0
        (pid,) = server.pids()
        assert psutil.pid_exists(pid)
        with pytest.raises(ConfigError, match=r"answers at .* already"):
            async with peer_server(peer):
                pass
    assert not psutil.pid_exists(pid)


async def test_a_server_that_ends_before_it_answers_is_said() -> None:
    """With the last that it wrote."""
    url = f"http://127.0.0.1:{free_port('127.0.0.1', 0)}/v1"
    for code, said in (("exit('no weights')", "no weights"), ("", "it said nothing")):
        peer = CompletionsPeer("theirs", url, (sys.executable, "-c", code))
        with pytest.raises(ConfigError, match=f"it has ended: {said}"):
            async with peer_server(peer):
                pass


async def test_a_command_that_is_not_there_is_said() -> None:
    """With its name."""
    with pytest.raises(ConfigError, match="cannot start /no/such/program"):
        async with started(["/no/such/program"]):
            pass


async def test_children_of_a_started_process_end_with_it() -> None:
    """Also those that it leaves behind."""
    code = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL).pid, flush=True)"
    async with started([sys.executable, "-c", code], piped=True) as parent:
        assert parent.process.stdout is not None
        child = int(await parent.process.stdout.readline())
        assert await parent.process.wait() == 0 and psutil.pid_exists(child)
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(child).wait(10) in {None, -signal.SIGKILL}


# -- OpenVINO

FAKE_OPENVINO = """
import enum, types

def Tensor(rows):
    return rows

class SchedulerConfig:
    enable_prefix_caching = False
    cache_size = 0

class GenerationConfig:
    pass

GenerationStatus = enum.Enum("GenerationStatus", "RUNNING FINISHED IGNORED")

class Handle:
    def __init__(self, last, num_tokens):
        self.first = self.last = last
        self.left, self.new = num_tokens, []
    def can_read(self):
        return bool(self.new)
    def read(self):
        tokens, self.new = self.new, []
        return {0: types.SimpleNamespace(generated_ids=tokens)}
    def get_status(self):
        if self.first == 14:
            return GenerationStatus.IGNORED
        return GenerationStatus.RUNNING if self.left else GenerationStatus.FINISHED

class ContinuousBatchingPipeline:
    def __init__(self, directory, scheduler, device, properties):
        print("a line that is no answer")
        if "NO_SUCH" in properties:
            raise RuntimeError("NO_SUCH is no property")
        self.size, self.handles = scheduler.cache_size, []
    def add_request(self, number, prompt, config):
        assert config.ignore_eos and not config.do_sample
        last = int(prompt[0][-1])
        if last == 13:
            raise RuntimeError("13 is not taken")
        self.handles.append(Handle(last, config.max_new_tokens))
        return self.handles[-1]
    def step(self):
        for handle in self.handles:
            if handle.first == 15:
                raise SystemExit("out of memory")
            if handle.left:
                handle.last, handle.left = handle.last + 1, handle.left - 1
                handle.new.append(handle.last + self.size)
"""


@pytest.fixture
def fake_openvino(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of its name, here and in processes that are started, whose model counts up from the prompt's last token."""
    for name in ("openvino", "openvino_genai"):
        (tmp_path / f"{name}.py").write_text(FAKE_OPENVINO)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return tmp_path


async def test_openvino_answers_in_a_process_of_its_own(fake_openvino: Path) -> None:
    """Several requests at once, each its own tokens; what it has not taken is refused with its words."""
    peer = OpenVinoPeer("ov", fake_openvino, (("cache_size", "100"),))

    async with peer_server(peer) as server:
        target = server.target
        assert server.figures["start_to_first_answer_s"] > 0 and len(server.pids()) == 1

        async def answer(last: int) -> list[int]:
            """Three tokens."""
            return [token for part in [each async for each in target.answer((1, last), 3)] for token in part]

        assert list(await asyncio.gather(answer(20), answer(30))) == [[121, 122, 123], [131, 132, 133]]
        for last, said in (
            (13, "13 is not taken"),
            (14, "no room"),
            (15, "out of memory"),
            (16, "has ended"),
        ):
            with pytest.raises(RefusedError, match=said):
                await answer(last)


async def test_openvino_that_is_silent_has_failed(
    fake_openvino: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like any other server; its request is over, and the load goes on."""
    async with openvino_target(OpenVinoPeer("ov", fake_openvino)) as (target, _):
        monkeypatch.setattr("benchmarks.serve.openvino_target.TIMEOUT_S", 0.0)
        with pytest.raises(RefusedError, match="silent"):
            await anext(target.answer((1, 2), 3))


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("NO_SUCH", "1", "no property"),
        ("no_such", "1", "no setting"),
        ("cache_size", "many", "Expecting value"),
    ],
)
async def test_openvino_that_cannot_load_is_said(
    fake_openvino: Path, setting: str, value: str, said: str
) -> None:
    """With the reason that it gives."""
    async with openvino_target(OpenVinoPeer("ov", fake_openvino, ((setting, value),))) as (target, _):
        with pytest.raises(ConfigError, match=said):
            await require_answer(target, "openvino")


def test_openvino_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a cluster is started, and with what installs it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[openvino\]"):
        require_peers([OpenVinoPeer("ov", Path())])
    require_peers([CompletionsPeer("other", "http://h:1/v1")])
