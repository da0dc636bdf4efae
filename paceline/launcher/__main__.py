"""`python -m paceline.launcher up [OPTIONS]`, or `fetch MODEL`."""

import sys

from paceline.launcher.fetch import fetch
from paceline.launcher.up import up

_COMMANDS = {"up": up, "fetch": fetch}

if __name__ == "__main__":
    command = _COMMANDS.get("".join(sys.argv[1:2]))
    if command is None:
        sys.exit(
            "usage: python -m paceline.launcher up [OPTIONS] | fetch MODEL; --help after either explains"
        )
    sys.exit(command(sys.argv[2:]))
