"""What `--against` and `--start` name: other servers, checked before anything is started."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from benchmarks.serve.targets import OURS
from paceline.core.errors import ConfigError

_FORM = re.compile(r"(?:(?P<name>[^:/?=]*)=)?(?:(?P<url>https?://.+)|openvino:(?P<directory>.+))", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CompletionsPeer:
    """A server at `url` that answers POST /completions; with a `command` the benchmark starts it."""

    name: str
    url: str
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenVinoPeer:
    """A model in OpenVINO's format, and settings by name: of its scheduler in small letters, of its plugin in capitals."""

    name: str
    directory: Path
    settings: tuple[tuple[str, str], ...] = ()


Peer = CompletionsPeer | OpenVinoPeer


def peers_of(against: Sequence[str], start: Sequence[str]) -> list[Peer]:
    """Raises ConfigError for what is no server, two of one name, and a command for none of them."""
    commands = dict(map(_command_of, start))
    peers = [_peer_of(text, commands) for text in against]
    names = [peer.name for peer in peers]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"--against: two servers are called {max(names, key=names.count)}; say NAME=URL of each"
        )
    startable = {peer.name for peer in peers if isinstance(peer, CompletionsPeer)}
    if unknown := sorted(commands.keys() - startable):
        raise ConfigError(f"--start {unknown[0]}: say where it listens, with --against {unknown[0]}=URL")
    return peers


def _peer_of(text: str, commands: dict[str, tuple[str, ...]]) -> Peer:
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"--against {text}: say NAME=http://HOST:PORT/v1, or NAME=openvino:DIR")
    name = found["name"]
    if name is None:
        name = "other" if found["url"] else "openvino"
    if name == OURS:
        raise ConfigError(f"--against {text}: {OURS} is what our own server is called")
    if not name.isidentifier():
        raise ConfigError(f"--against {text}: {name!r} is no name of letters, digits and _")
    if found["url"]:
        return CompletionsPeer(name, found["url"].rstrip("/"), commands.get(name, ()))
    directory, _, settings = found["directory"].partition("?")
    if not Path(directory).is_dir():
        raise ConfigError(f"--against {text}: {directory} is no directory")
    return OpenVinoPeer(name, Path(directory), tuple(parse_qsl(settings, keep_blank_values=True)))


def _command_of(text: str) -> tuple[str, tuple[str, ...]]:
    name, _, command = text.partition("=")
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise ConfigError(f"--start {text}: {error}") from error
    if not words:
        raise ConfigError(f"--start {text}: say NAME='COMMAND'")
    return name, words
