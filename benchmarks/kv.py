"""`./run bench kv`: the hand-over measured part by part. Each part is a section, a module of its own that gives its numbers."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import kv_transports
from benchmarks.simulator.options import write_json
from paceline.runtime.log import configure_logging
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
    configure_logging("bench", "", "warning")
    keep_freed_memory()
    numbers: dict[str, Any] = {}
    for name in args.only or SECTIONS:
        numbers |= SECTIONS[name](_say)
    if args.json:
        write_json(args.json, numbers)
    return 0


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
