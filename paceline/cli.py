"""One answer (`generate`) or a conversation (`chat`) on the command line, streamed from a Paceline server."""

import argparse
import asyncio
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any

import grpc
from google.protobuf.message import Message as ProtoMessage

from paceline.client import (
    DEFAULT_ADDRESS,
    DEFAULT_TIMEOUT_S,
    Completion,
    GenerateOptions,
    Message,
    PacelineClient,
    Prompt,
)
from paceline.client_error import PacelineRpcError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as a shell reports a program that SIGINT ended
EXIT_PIPE_CLOSED = 141  # and one that SIGPIPE ended

_GENERATE_EXAMPLES = """\
examples:
  ./run generate "What is the capital of France?"
  ./run generate --system "Answer in one word." "The colour of the sky?"
  ./run generate - < question.txt               read the prompt from stdin
  ./run generate --raw "Once upon a time"       continue a text, without the chat template
  ./run generate --temperature 0.8 --seed 7 "Tell me a joke."
  ./run generate --stop $'\\n' --max-tokens 40 "Name a river."
  ./run generate --json "Hello" | jq .usage     one JSON object, once the answer is complete

Ctrl-C cancels the request on the server and exits with 130. Errors are one line on stderr and exit 1.
"""
_CHAT_EXAMPLES = """\
examples:
  ./run chat
  ./run chat --system "You are a patient teacher." --temperature 0.7

Ctrl-C while an answer comes cancels it on the server, keeps what was shown and returns to the prompt.
Ctrl-C or Ctrl-D at the prompt leaves.
"""
_SYSTEM_HELP = "a system message that comes before everything else"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; gives its exit status."""
    args = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an answer may hold what the terminal cannot show
    try:
        args.run(args)
    except PacelineRpcError as error:
        return _fail(_explain(error, args.address))
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
    async with PacelineClient(args.address) as client:
        if args.json:
            _show(_as_json(await client.generate_text(prompt, **_options(args))) + "\n")
        else:
            await _show_answer(client, prompt, _options(args), [])


def _chat(args: argparse.Namespace) -> None:
    # One loop for the whole conversation: it runs while an answer comes, and stands still at the prompt.
    with asyncio.Runner() as runner:
        client = runner.run(_connect(args.address))
        try:
            _converse(runner, client, args)
        finally:
            runner.run(client.aclose())


def _converse(runner: asyncio.Runner, client: PacelineClient, args: argparse.Namespace) -> None:
    messages = _system(args)
    while (question := _ask()) is not None:
        if question.strip():
            _take_turn(runner, client, messages, question, args)


async def _connect(address: str) -> PacelineClient:
    """A client whose server answers: better to hear it now than after the first question."""
    client = PacelineClient(address)
    info = await client.server_info()
    if sys.stdin.isatty():
        sys.stderr.write(f"{info.model_id}; Ctrl-C stops an answer, Ctrl-D leaves\n")
    return client


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
        runner.run(_show_answer(client, asked, _options(args), shown))
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


def _options(args: argparse.Namespace) -> GenerateOptions:
    return GenerateOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.seed,
        stop=args.stop,
        timeout_s=args.timeout,
    )


def _as_json(completion: Completion) -> str:
    return json.dumps(
        {
            "request_id": completion.request_id,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "matched_stop": completion.matched_stop,
            "usage": _fields(completion.usage),
            "timeline": _fields(completion.timeline),
        }
    )


def _fields(message: ProtoMessage) -> dict[str, Any]:
    """A flat message with its own field names, zeros included."""
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _explain(error: PacelineRpcError, address: str) -> str:
    if error.code is grpc.StatusCode.UNAVAILABLE and not error.reason:
        return f"no Paceline server answers at {address}; start one with ./run up, or name it with --address"
    if error.retry_after_s is not None:
        return f"{error}; try again in {error.retry_after_s:g} s"
    return str(error)


def _fail(line: str) -> int:
    sys.stderr.write(f"error: {line}\n")
    return EXIT_FAILED


def _forget_stdout() -> None:
    """Python flushes stdout once more when it exits; let that go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./run", description="Talk to a Paceline server.")
    commands = parser.add_subparsers(required=True, metavar="generate | chat")
    shared = _shared_options()
    layout = argparse.RawDescriptionHelpFormatter
    generate = commands.add_parser(
        "generate", parents=[shared], epilog=_GENERATE_EXAMPLES, formatter_class=layout, help="one answer"
    )
    generate.add_argument("prompt", help="what to ask; - reads it from stdin")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    layouts = generate.add_mutually_exclusive_group()
    layouts.add_argument("--system", metavar="TEXT", help=_SYSTEM_HELP)
    layouts.add_argument("--raw", action="store_true", help="continue the text, without a chat template")
    generate.set_defaults(run=_generate)
    chat = commands.add_parser(
        "chat", parents=[shared], epilog=_CHAT_EXAMPLES, formatter_class=layout, help="a conversation"
    )
    chat.add_argument("--system", metavar="TEXT", help=_SYSTEM_HELP)
    chat.set_defaults(run=_chat)
    return parser


def _shared_options() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False)
    add = shared.add_argument
    add("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="where the server is (%(default)s)")
    add(
        "--max-tokens", type=_natural(32), metavar="N", help="most tokens of an answer (the server's default)"
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 always takes the best token (%(default)s)",
    )
    add("--top-p", type=float, metavar="P", help="sample from the likeliest tokens that sum up to P")
    add("--top-k", type=_natural(32), metavar="K", help="sample from the K likeliest tokens")
    add("--seed", type=_natural(64), metavar="N", help="the same seed gives the same answer")
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before TEXT; may be given several times",
    )
    add(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT_S,
        metavar="S",
        help="seconds for an answer (%(default)g)",
    )
    return shared


def _natural(bits: int) -> Callable[[str], int]:
    """Parses a number that the wire can carry; argparse takes the name for its message."""

    def number(text: str) -> int:
        value = int(text)
        if not 0 <= value < 1 << bits:
            raise argparse.ArgumentTypeError(f"{text} is not between 0 and 2^{bits} - 1")
        return value

    return number


if __name__ == "__main__":
    sys.exit(main())
