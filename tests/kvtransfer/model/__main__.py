"""Explores one system, or what becomes of it without a rule, and prints what was found: `python -m tests.kvtransfer.model NAME`."""

import sys

from tests.kvtransfer.model.books import Rules
from tests.kvtransfer.model.explorer import Explorer
from tests.kvtransfer.model.instances import LARGE, SMALL
from tests.kvtransfer.model.mutations import KILLS
from tests.kvtransfer.model.words import Mutation


def _rules(name: str) -> Rules:
    """The system of this name, or the smallest one in which this mutation shows."""
    instances = SMALL | LARGE
    if name in instances:
        return Rules(instances[name])
    mutation = Mutation.__members__.get(name.upper())
    if mutation is None:
        names = [*instances, *(mutation.name for mutation in Mutation)]
        sys.exit("which one?\n  " + "\n  ".join(names))
    return Rules(KILLS[mutation].instance, mutation)


def main() -> None:
    """Says how many states there are, and how to come to the first bad one."""
    found = Explorer(_rules(" ".join(sys.argv[1:]))).run()
    lines = [f"{found.num_states:,} states, {found.num_steps:,} steps, depth {found.depth}"]
    if found.violation is not None:
        lines += [f"{found.violation.broken} does not hold after:", *found.violation.trace]
    sys.stdout.write("\n  ".join(lines) + "\n")


if __name__ == "__main__":
    main()
