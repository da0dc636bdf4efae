"""`./run bench kv`: the hand-over measured part by part. Each part is a section, a module of its own that gives its numbers."""

import argparse
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from benchmarks import kv_handover, kv_transports, prefix_table
from benchmarks.simulator.options import say, write_json
from paceline.runtime.memory import keep_freed_memory

# A section prints its table, says on stderr what it is doing, and gives its keys for --json.
Section = Callable[[Callable[[str], None], argparse.Namespace], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "transports": lambda say, _: kv_transports.measure(say),
    "handover": kv_handover.measure,
    "table": prefix_table.measure,
}


def main(argv: Sequence[str]) -> int:
    """Runs the sections; always 0: these are measurements, and no promise is broken by them."""
    parser = argparse.ArgumentParser("./run bench kv", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument(
        "--only", choices=sorted(SECTIONS), action="append", help="one section; may be given again"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="of the hand-over: another model than the default one"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of the hand-over: requests of each length (default: 3)"
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=kv_handover.LENGTHS,
        help="of the hand-over: prompts in tokens",
    )
    parser.add_argument(
        "--entries", type=int, default=1_000_000, help="of the table: blocks that it holds (default: 1000000)"
    )
    parser.add_argument(
        "--lookups", type=int, default=400, help="of the table: look-ups of each length (default: 400)"
    )
    args = parser.parse_args(argv)
    keep_freed_memory()
    numbers: dict[str, Any] = {}
    with _warnings_only():
        for name in args.only or SECTIONS:
            numbers |= SECTIONS[name](say, args)
    if args.json:
        write_json(args.json, numbers)
    return 0


@contextmanager
def _warnings_only() -> Iterator[None]:
    """What the parts log of their good days does not belong between the lines of a table."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        yield
    finally:
        structlog.configure(**before)
