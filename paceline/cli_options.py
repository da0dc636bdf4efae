"""The flags of the command line, and what they ask of the client."""

import argparse
from collections.abc import Callable
from typing import get_args

from paceline.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S, GenerateOptions, Priority
from paceline.client_channel import Tls

Command = Callable[[argparse.Namespace], None]

_GENERATE_EXAMPLES = """\
examples:
  ./run generate "What is the capital of France?"
  ./run generate --system "Answer in one word." "The colour of the sky?"
  ./run generate - < question.txt               read the prompt from stdin
  ./run generate --raw "Once upon a time"       continue a text, without the chat template
  ./run generate --temperature 0.8 --seed 7 "Tell me a joke."
  ./run generate -n 3 --temperature 0.8 "Name a colour."
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
# A key on a command line is seen by every user of the machine, and kept by shells.
PACELINE_API_KEY = "PACELINE_API_KEY"
_SYSTEM_HELP = "a system message that comes before everything else"


def make_parser(*, generate: Command, chat: Command) -> argparse.ArgumentParser:
    """Parses either command; `run` of what it gives is the one to call."""
    parser = argparse.ArgumentParser(prog="./run", description="Talk to a Paceline server.")
    commands = parser.add_subparsers(required=True, metavar="generate | chat")
    shared = _shared_options()
    layout = argparse.RawDescriptionHelpFormatter
    for_generate = commands.add_parser(
        "generate", parents=[shared], epilog=_GENERATE_EXAMPLES, formatter_class=layout, help="one answer"
    )
    for_generate.add_argument("prompt", help="what to ask; - reads it from stdin")
    for_generate.add_argument(
        "--json", action="store_true", help="print one JSON object instead of streaming"
    )
    for_generate.add_argument(
        "-n",
        type=_natural(32),
        metavar="N",
        help="N candidates, shown one after the other once all are complete; alike at temperature 0. "
        "With --json: an array",
    )
    for_generate.add_argument(
        "--prompt-logprobs",
        action="store_true",
        help="with --json: log probabilities of the prompt's tokens too, from the second on",
    )
    layouts = for_generate.add_mutually_exclusive_group()
    layouts.add_argument("--system", metavar="TEXT", help=_SYSTEM_HELP)
    layouts.add_argument("--raw", action="store_true", help="continue the text, without a chat template")
    for_generate.set_defaults(run=generate)
    for_chat = commands.add_parser(
        "chat", parents=[shared], epilog=_CHAT_EXAMPLES, formatter_class=layout, help="a conversation"
    )
    for_chat.add_argument("--system", metavar="TEXT", help=_SYSTEM_HELP)
    for_chat.set_defaults(run=chat, prompt_logprobs=False, n=None)
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
    add(
        "--min-p",
        type=float,
        metavar="P",
        help="sample from tokens at least P times as likely as the best one",
    )
    add(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="make every token that was seen less likely; 1 does nothing",
    )
    add(
        "--presence-penalty",
        type=float,
        metavar="X",
        help="subtract X from the logit of each token that was generated",
    )
    add("--frequency-penalty", type=float, metavar="X", help="the same for each time that it was generated")
    add("--min-tokens", type=_natural(32), metavar="N", help="no end before N tokens")
    add(
        "--logprobs",
        type=_natural(32),
        metavar="N",
        help="with --json: log probabilities of each token and of the N best, 0 to 20",
    )
    add(
        "--seed",
        type=_natural(64),
        metavar="N",
        help="the same seed gives the same answer, up to rounding; always with ./run up --exactness exact",
    )
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer before TEXT; may be given several times",
    )
    add("--api-key", metavar="KEY", help=f"whose request it is; better given in {PACELINE_API_KEY}")
    add(
        "--tls",
        action="store_true",
        help="the server speaks TLS, with a certificate that gRPC's own roots know",
    )
    add("--tls-ca", metavar="FILE", help="the same, with a certificate that this CA has signed, in PEM")
    add(
        "--tls-cert",
        metavar="FILE",
        help="with TLS: our own certificate, in PEM, for a server that asks for one",
    )
    add("--tls-key", metavar="FILE", help="the key of --tls-cert")
    add(
        "--tls-name", metavar="NAME", help="with TLS: the name in the server's certificate, if not its host's"
    )
    add("--priority", choices=get_args(Priority), help="how urgent it is (standard)")
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


def tls_of(args: argparse.Namespace) -> Tls | None:
    """How the connection is encrypted, if it is; raises ValueError for half of a pair."""
    given = (args.tls_ca, args.tls_cert, args.tls_key, args.tls_name)
    return Tls(*given) if args.tls or any(given) else None


def generate_options(args: argparse.Namespace) -> GenerateOptions:
    """What a request of either command asks for."""
    return GenerateOptions(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        min_tokens=args.min_tokens,
        num_top_logprobs=args.logprobs,
        prompt_logprobs=args.prompt_logprobs,
        seed=args.seed,
        stop=args.stop,
        n=args.n,
        priority=args.priority,
        timeout_s=args.timeout,
    )
