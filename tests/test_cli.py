"""The command line as its users run it: a process of its own against a small service."""

import asyncio
import json
import os
import pty
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from paceline.v1 import inference_pb2
from tests.fake_inference import ENDLESS, FLOOD, FULL, NO_KEY, TOO_LONG, FakeInference

Answer = tuple[int, str, str]


async def _start(*args: str, stdin: int = PIPE, stdout: int = PIPE) -> Process:
    # A shell that starts this test in the background may have told us to ignore SIGINT; the command must not.
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-c", "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + _MAIN),
        *args,
        stdin=stdin,
        stdout=stdout,
        stderr=PIPE,
    )


_MAIN = "import sys, paceline.cli; sys.exit(paceline.cli.main())"


async def _finish(process: Process, given: bytes = b"") -> Answer:
    """Exit status, stdout and stderr."""
    out, err = await process.communicate(given if process.stdin else None)
    assert process.returncode is not None
    return process.returncode, (out or b"").decode(), err.decode()


async def _run(*args: str, given: bytes = b"") -> Answer:
    return await _finish(await _start(*args), given)


async def _read_until(process: Process, text: bytes) -> None:
    assert process.stdout is not None
    await process.stdout.readuntil(text)


async def test_generate_streams_an_answer(fake_inference: FakeInference) -> None:
    """The prompt is asked as a user's message, greedily, and the answer goes to stdout with a line's end."""
    answer = await _run("generate", "one two", "--address", fake_inference.address)
    assert answer == (0, "one two\n", "")
    (request,) = fake_inference.requests
    assert [(message.role, message.content) for message in request.chat.messages] == [("user", "one two")]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0


async def test_log_probabilities_of_the_prompt_are_in_the_object(fake_inference: FakeInference) -> None:
    """With --prompt-logprobs; without it the list is empty."""
    asking = ("generate", "--json", "one", "--address", fake_inference.address)
    with_them, without = [
        json.loads((await _run(*asking, *more))[1])["prompt_logprobs"] for more in (["--prompt-logprobs"], [])
    ]
    assert [entry["token_id"] for entry in with_them] == [7, 9]
    assert with_them[0] == {"token_id": 7, "logprob": -0.5, "top": [{"token_id": 8, "logprob": -0.25}]}
    assert without == []


async def test_log_probabilities_that_nobody_would_see_are_refused(fake_inference: FakeInference) -> None:
    """Without --json nothing shows them: the command says so, and asks for nothing."""
    status, out, error = await _run(
        "generate", "one", "--prompt-logprobs", "--address", fake_inference.address
    )
    assert (status, out) == (2, "")
    assert "--prompt-logprobs needs --json" in error
    assert fake_inference.requests == []


async def test_options_become_fields_of_the_request(fake_inference: FakeInference) -> None:
    """Each option arrives where the contract has it; what is not given is left to the server."""
    options = "--max-tokens 5 --temperature 0.5 --top-p 0.9 --top-k 40 --seed 7 --stop ### --stop END --priority batch"
    await _run(
        "generate", "hi", "--system", "Be brief.", "--address", fake_inference.address, *options.split()
    )
    (request,) = fake_inference.requests
    assert [message.content for message in request.chat.messages] == ["Be brief.", "hi"]
    sampling, stopping = request.sampling, request.stopping
    assert (sampling.temperature, round(sampling.top_p, 3), sampling.top_k, sampling.seed) == (
        0.5,
        0.9,
        40,
        7,
    )
    assert (stopping.max_tokens, list(stopping.stop)) == (5, ["###", "END"])
    assert request.priority == inference_pb2.PRIORITY_BATCH


async def test_raw_text_from_stdin(fake_inference: FakeInference) -> None:
    """`-` reads the prompt from stdin, and --raw sends it without the chat template."""
    answer = await _run(
        "generate", "--raw", "-", "--address", fake_inference.address, given="Größe\n".encode()
    )
    assert answer == (0, "Größe\n\n", "")
    assert fake_inference.requests[0].text == "Größe\n"


async def test_json_is_one_object(fake_inference: FakeInference) -> None:
    """With --json stdout holds one JSON object with the whole answer, numbers as numbers."""
    status, out, _ = await _run("generate", "one two", "--json", "--address", fake_inference.address)
    found = json.loads(out)
    assert (status, out.count("\n")) == (0, 1)
    assert (found["text"], found["token_ids"], found["finish_reason"]) == ("one two", [0, 1], "stop")
    assert (found["matched_stop"], found["usage"]["cached_tokens"]) == ("###", 2)
    assert (found["timeline"]["kv_bytes"], found["timeline"]["preemptions"]) == (1 << 40, 0)


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        (TOO_LONG, "limit is 4096; shorten it (PROMPT_TOO_LONG)"),
        (FULL, "error: the queue is full; try again in 1.5 s (QUEUE_FULL)"),
    ],
)
async def test_a_refusal_is_one_line(fake_inference: FakeInference, prompt: str, line: str) -> None:
    """What the server refuses is one line on stderr with the reason, and exit 1."""
    status, out, err = await _run("generate", prompt, "--address", fake_inference.address)
    assert (status, out) == (1, "")
    assert err.startswith("error: ")
    assert err.endswith(f"{line}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", [("generate", "hi"), ("chat",)])
async def test_no_server_says_how_to_start_one(unused_tcp_port: int, command: tuple[str, ...]) -> None:
    """Where nobody listens, one line names the address and ./run up."""
    address = f"127.0.0.1:{unused_tcp_port}"
    status, out, err = await _run(*command, "--address", address)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert address in err
    assert "./run up" in err


@pytest.mark.parametrize(
    "args", [("generate",), ("generate", "hi", "--seed", "-1"), ("generate", "hi", "--top-k", "x")]
)
async def test_wrong_arguments_exit_with_2(args: tuple[str, ...]) -> None:
    """A wrong argument is explained before anything is sent."""
    status, out, err = await _run(*args)
    assert (status, out) == (2, "")
    assert "usage: ./run generate" in err


async def test_a_prompt_that_is_not_text_is_one_line() -> None:
    """Bytes on stdin that are no UTF-8 are refused without a traceback."""
    status, _, err = await _run("generate", "-", given=b"\xff\xfe")
    assert (status, err) == (1, "error: the prompt is not valid UTF-8\n")


async def test_help_teaches_with_examples() -> None:
    """--help shows whole commands to copy."""
    for command in ("generate", "chat"):
        status, out, _ = await _run(command, "--help")
        assert status == 0
        assert f"  ./run {command}" in out


async def test_ctrl_c_cancels_the_request_and_exits_with_130(fake_inference: FakeInference) -> None:
    """SIGINT in the middle of an answer reaches the server as a cancel; the command says nothing more."""
    process = await _start("generate", ENDLESS, "--address", fake_inference.address)
    await _read_until(process, ENDLESS.encode())
    process.send_signal(signal.SIGINT)
    status, _, err = await _finish(process)
    await fake_inference.cancelled.wait()
    assert (status, err) == (130, "")


async def test_a_closed_pipe_cancels_the_request_in_silence(fake_inference: FakeInference) -> None:
    """When the reader of stdout leaves, as `head` does, the request is cancelled and nothing is printed."""
    read_end, write_end = os.pipe()
    process = await _start("generate", FLOOD, "--address", fake_inference.address, stdout=write_end)
    os.close(write_end)
    os.close(read_end)
    status, _, err = await _finish(process)
    await fake_inference.cancelled.wait()
    assert (status, err) == (141, "")


async def test_no_stdout_at_all_is_fine(fake_inference: FakeInference) -> None:
    """An answer may go nowhere."""
    process = await _start("generate", "hi", "--address", fake_inference.address, stdout=DEVNULL)
    assert (await _finish(process))[0] == 0


async def test_chat_keeps_the_history(fake_inference: FakeInference) -> None:
    """Each question is asked together with the system message and all that was said before; empty lines ask nothing."""
    args = ("chat", "--system", "Be brief.", "--address", fake_inference.address)
    answer = await _run(*args, given=b"one two\n\nthree\n")
    assert answer == (0, "one two\nthree\n", "")
    roles = [[message.role for message in request.chat.messages] for request in fake_inference.requests]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert fake_inference.requests[1].chat.messages[2].content == "one two"


async def test_chat_goes_on_after_an_error(fake_inference: FakeInference) -> None:
    """A question that the server refuses is left out of the history, and the conversation goes on."""
    status, out, err = await _run("chat", "--address", fake_inference.address, given=b"too long\nthree\n")
    assert (status, out) == (0, "three\n")
    assert err.startswith("error: ")
    assert [message.content for message in fake_inference.requests[1].chat.messages] == ["three"]


async def test_ctrl_c_in_chat_cancels_the_answer_and_goes_on(fake_inference: FakeInference) -> None:
    """SIGINT during an answer cancels that request, keeps what was shown, and the next question is answered."""
    process = await _start("chat", "--address", fake_inference.address)
    assert process.stdin is not None
    process.stdin.write(f"{ENDLESS}\n".encode())
    await _read_until(process, ENDLESS.encode())
    process.send_signal(signal.SIGINT)
    await fake_inference.cancelled.wait()
    status, out, err = await _finish(process, b"three\n")
    assert (status, out, err) == (0, "\nthree\n", "")
    contents = [message.content for message in fake_inference.requests[1].chat.messages]
    assert contents == [ENDLESS, ENDLESS, "three"]


@pytest.mark.parametrize("key", [b"\x03", b"\x04"], ids=["ctrl-c", "ctrl-d"])
async def test_chat_on_a_terminal_is_left_with_a_key(fake_inference: FakeInference, key: bytes) -> None:
    """On a terminal there is a prompt, and Ctrl-C and Ctrl-D at it leave with exit 0 and no traceback."""
    ours, theirs = pty.openpty()
    process = await _start("chat", "--address", fake_inference.address, stdin=theirs, stdout=theirs)
    os.close(theirs)
    async with _reading(ours) as terminal:
        await terminal.readuntil(b"> ")
        if key == b"\x03":
            # The terminal would send it to the whole session that runs the tests. Python's line editor hears a signal
            # that comes just before it waits for a key only after the next line: so give it one.
            process.send_signal(signal.SIGINT)
            key = b"\n"
        with suppress(OSError):
            os.write(ours, key)
        status, _, err = await _finish(process)
    assert (status, err) == (0, "fake-model; Ctrl-C stops an answer, Ctrl-D leaves\n")


@asynccontextmanager
async def _reading(descriptor: int) -> AsyncIterator[asyncio.StreamReader]:
    """What comes out of a terminal, without a thread that could wait for it forever."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    yield reader
    transport.close()


async def test_candidates_are_shown_one_after_the_other(fake_inference: FakeInference) -> None:
    """Each under its own line; with --json an array of the objects that one answer would be."""
    asking = ("generate", "one two", "-n", "2", "--address", fake_inference.address)
    status, out, _ = await _run(*asking)
    assert (status, out) == (0, "--- candidate 0 (stop)\none two\n--- candidate 1 (stop)\none two 1\n")
    status, out, _ = await _run(*asking, "--json")
    assert status == 0
    assert [found["text"] for found in json.loads(out)] == ["one two", "one two 1"]


async def test_a_key_comes_from_the_environment_or_a_flag(
    fake_inference: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag wins; without either nothing is said of a key."""
    generate = ("generate", "one", "--address", fake_inference.address)
    await _run(*generate)
    monkeypatch.setenv("PACELINE_API_KEY", "key-1")
    await _run(*generate)
    await _run(*generate, "--api-key", "key-2")
    await _run("chat", "--address", fake_inference.address, given=b"one\n")
    assert fake_inference.keys == [None, "Bearer key-1", "Bearer key-2", "Bearer key-1", "Bearer key-1"]


async def test_who_has_no_key_hears_how_to_give_one(fake_inference: FakeInference) -> None:
    """In one line; and what cannot be a key is refused at once, unseen."""
    status, _, err = await _run("generate", NO_KEY, "--address", fake_inference.address)
    assert (status, "PACELINE_API_KEY" in err, err.count("\n")) == (1, True, 1)
    status, _, err = await _run("generate", "one", "--api-key", "not a key")
    assert status == 2
    assert "API key" in err
    assert "not a key" not in err


async def test_half_of_a_certificate_is_a_wrong_argument() -> None:
    """Named before anything is sent."""
    done = await _run("generate", "hi", "--tls-cert", "c.pem")
    assert (done[0], "go together" in done[2]) == (2, True)
