"""`./run bench kv`: the hand-over measured part by part. Each part is a section, a module of its own that gives its numbers."""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog

from benchmarks import kv_transports
from benchmarks.simulator.options import write_json
from paceline.runtime.memory import keep_freed_memory

# A section prints its table, says on stderr what it is doing, and gives its keys for --json.
Section = Callable[[Callable[[str], None]], dict[str, Any]]
SECTIONS: dict[str, Section] = {
    "transports": kv_transports.measure,
}


def main(argv: Sequence[str]) -> int:
    """Runs the sections; always 0: these are measurements, and no promise is broken by them."""
    parser = argparse.ArgumentParser("./run bench kv", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers here")
    parser.add_argument(
        "--only", choices=sorted(SECTIONS), action="append", help="one section; may be given again"
    )
    args = parser.parse_args(argv)
    keep_freed_memory()
    numbers: dict[str, Any] = {}
    with _warnings_only():
        for name in args.only or SECTIONS:
            numbers |= SECTIONS[name](_say)
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


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
