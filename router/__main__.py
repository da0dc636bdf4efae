"""`python -m router`: one router."""

import sys

from paceline.runtime.config import load_config
from router.config import RouterConfig
from router.server import run_router


def main() -> int:
    """Runs until SIGTERM."""
    config = load_config(
        RouterConfig,
        sys.argv[1:],
        prog="python -m router",
        section="router",
        about="The router: takes requests, tokenises, places them on prefill and decode workers, streams text back.",
    )
    return run_router(config)


if __name__ == "__main__":
    sys.exit(main())
