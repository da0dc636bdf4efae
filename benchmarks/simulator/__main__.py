"""`./run simulate`."""

import sys

from benchmarks.simulator.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
