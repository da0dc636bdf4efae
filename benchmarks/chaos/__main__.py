"""`./run chaos`."""

import sys

from benchmarks.chaos.cli import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
