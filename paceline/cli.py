"""One answer (`generate`) or a conversation (`chat`) on the command line, streamed from a Paceline server."""

import argparse
import asyncio
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
from google.protobuf.message import Message as ProtoMessage

from paceline.cli_options import PACELINE_API_KEY, generate_options, make_parser, tls_of
from paceline.client import (
    Completion,
    GenerateOptions,
    Message,
    PacelineClient,
    Prompt,
)
from paceline.client_channel import key_metadata
from paceline.client_error import PacelineRpcError
from paceline.v1 import generation_pb2

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
EXIT_PIPE_CLOSED = 141  # and one that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit status."""
    parser = make_parser(generate=_generate, chat=_chat)
    args = parser.parse_args(argv)
    args.api_key = args.api_key or os.environ.get(PACELINE_API_KEY)
    try:
        key_metadata(args.api_key)
        args.connection_tls = tls_of(args)
    except ValueError as error:
        parser.error(str(error))
    for option in ("logprobs", "prompt_logprobs"):
        if getattr(args, option) not in (None, False) and not getattr(args, "json", False):
            parser.error(f"--{option.replace('_', '-')} needs --json: a streamed answer does not show them")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    try:
        args.run(args)
    except PacelineRpcError as error:
        return _fail(_explain(error, args.address))
    except FileNotFoundError as error:
        return _fail(f"cannot read {error.filename}: {error.strerror}")
    except UnicodeError:
        return _fail("the prompt is not valid UTF-8")
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return EXIT_PIPE_CLOSED
    return 0


def _generate(args: argparse.Namespace) -> None:
    content = sys.stdin.buffer.read().decode() if args.prompt == "-" else args.prompt
    prompt = content if args.raw else [*_system(args), {"role": "user", "content": content}]
    asyncio.run(_one_answer(args, prompt))


async def _one_answer(args: argparse.Namespace, prompt: Prompt) -> None:
    async with _client(args) as client:
        if args.n not in (None, 1):
            completions = await client.generate_texts(prompt, **generate_options(args))
            _show(_as_json_array(completions) if args.json else _one_by_one(completions))
        elif args.json:
            _show(_as_json(await client.generate_text(prompt, **generate_options(args))) + "\n")
        else:
            await _show_answer(client, prompt, generate_options(args), [])


def _chat(args: argparse.Namespace) -> None:
    # One loop for the whole conversation: it runs while an answer comes, and stands still at the prompt.
    with asyncio.Runner() as runner:
        client = runner.run(_connect(args))
        try:
            _converse(runner, client, args)
        finally:
            runner.run(client.aclose())


def _converse(runner: asyncio.Runner, client: PacelineClient, args: argparse.Namespace) -> None:
    messages = _system(args)
    while (question := _ask()) is not None:
        if question.strip():
            _take_turn(runner, client, messages, question, args)


async def _connect(args: argparse.Namespace) -> PacelineClient:
    """A client whose server answers: better to hear it now than after the first question."""
    client = _client(args)
    info = await client.server_info()
    if sys.stdin.isatty():
        sys.stderr.write(f"{info.model_id}; Ctrl-C stops an answer, Ctrl-D leaves\n")
    return client


def _client(args: argparse.Namespace) -> PacelineClient:
    return PacelineClient(args.address, api_key=args.api_key, tls=args.connection_tls)


def _ask() -> str | None:
    """The next line, or None at the end; a prompt is shown only where somebody types."""
    with suppress(ImportError):
        import readline  # noqa: F401, PLC0415 - gives input() a line editor, on the systems that have it
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        if sys.stdin.isatty():
            _show("\n")
        return None


def _take_turn(
    runner: asyncio.Runner,
    client: PacelineClient,
    messages: list[Message],
    question: str,
    args: argparse.Namespace,
) -> None:
    """Question and answer join the conversation as far as the answer was shown; without one, neither does."""
    asked: list[Message] = [*messages, {"role": "user", "content": question}]
    shown: list[str] = []
    try:
        runner.run(_show_answer(client, asked, generate_options(args), shown))
    except KeyboardInterrupt:
        _show("\n")
    except PacelineRpcError as error:
        _fail(_explain(error, args.address))
    if any(shown):
        messages[:] = [*asked, {"role": "assistant", "content": "".join(shown)}]


async def _show_answer(
    client: PacelineClient, prompt: Prompt, options: GenerateOptions, shown: list[str]
) -> None:
    """Writes an answer as it comes, and notes in `shown` what was written."""
    async with aclosing(client.generate(prompt, **options)) as events:
        async for event in events:
            _show(event.delta.text)
            shown.append(event.delta.text)
    _show("\n")


def _show(text: str) -> None:
    if text:
        print(text, end="", flush=True)


def _system(args: argparse.Namespace) -> list[Message]:
    return [{"role": "system", "content": args.system}] if args.system else []


def _one_by_one(completions: Sequence[Completion]) -> str:
    return "".join(
        f"--- candidate {index} ({completion.finish_reason})\n{completion.text}\n"
        for index, completion in enumerate(completions)
    )


def _as_json_array(completions: Sequence[Completion]) -> str:
    return "[" + ",\n".join(map(_as_json, completions)) + "]\n"


def _as_json(completion: Completion) -> str:
    return json.dumps(
        {
            "request_id": completion.request_id,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "matched_stop": completion.matched_stop,
            "logprobs": [_logprob(each) for each in completion.logprobs],
            "prompt_logprobs": [_logprob(each) for each in completion.prompt_logprobs],
            "usage": _fields(completion.usage),
            "timeline": _fields(completion.timeline),
        }
    )


def _logprob(message: generation_pb2.TokenLogprob) -> dict[str, Any]:
    return {
        "token_id": message.token_id,
        "logprob": message.logprob,
        "top": [{"token_id": top.token_id, "logprob": top.logprob} for top in message.top],
    }


def _fields(message: ProtoMessage) -> dict[str, Any]:
    """A flat message with its own field names, zeros included."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _explain(error: PacelineRpcError, address: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        return f"no Paceline server answers at {address}; {_unreached(error)}"
    if error.code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{error}; give the key with --api-key, or in {PACELINE_API_KEY}"
    return str(error)


def _unreached(error: PacelineRpcError) -> str:
    """Whether nobody listens there, or somebody hangs up on us."""
    if "Socket closed" in error.message:
        return "it hangs up: does it speak TLS (--tls, --tls-ca), and ask for a certificate (--tls-cert)?"
    if "handshake" in error.message or "erification" in error.message:
        return f"TLS fails: {error.message}"
    return "start one with ./run up, or name it with --address"


def _fail(line: str) -> int:
    sys.stderr.write(f"error: {line}\n")
    return EXIT_FAILED


def _forget_stdout() -> None:
    """Python flushes stdout once more when it exits; let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
