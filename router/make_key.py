"""`./run key NAME`: a new API key for a tenant, and what the tenants' file says of it. Nothing is kept."""

import argparse
import sys
from collections.abc import Sequence

from router.tenants import NAME, new_key


def main(argv: Sequence[str] | None = None) -> int:
    """Prints both; gives the exit status."""
    parser = argparse.ArgumentParser(prog="./run key", description="Make an API key for a tenant.")
    parser.add_argument("name", metavar="NAME", help="the tenant: 1 to 64 letters, digits, - and _")
    name = parser.parse_args(argv).name
    if not NAME.fullmatch(name):
        parser.error("a tenant's name has 1 to 64 letters, digits, - and _")
    key, digest = new_key()
    sys.stdout.write(
        f"# The key of {name}, for its clients alone; only its hash is kept:\n# {key}\n"
        f'[tenants.{name}]\nkey_hashes = ["{digest}"]\n'
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
