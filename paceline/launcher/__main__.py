"""`python -m paceline.launcher up [OPTIONS]`."""

import sys

from paceline.launcher.up import up

if __name__ == "__main__":
    if sys.argv[1:2] != ["up"]:
        sys.exit("usage: python -m paceline.launcher up [OPTIONS]; `up --help` explains them")
    sys.exit(up(sys.argv[2:]))
