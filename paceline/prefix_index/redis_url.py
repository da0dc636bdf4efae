"""Where a Redis is, as a setting says it: one server, Sentinels that know it, or a Redis Cluster.

    redis://[user[:password]@]host[:port][/db]           rediss://... is the same over TLS
    unix://[user[:password]@]/path[?db=N]
    redis+sentinel://[user:password@]host[:port][,host[:port]...]/service[/db]      rediss+sentinel://...
    redis+cluster://[user:password@]host[:port][,host[:port]...]                    rediss+cluster://...
    @/path                                               a file that holds one of these: nobody sees it among a process's arguments

What is wrong is said without the password, which never leaves this module but in a `RedisAddress`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, unquote

from paceline.core.errors import ConfigError

Kind = Literal["server", "unix", "sentinel", "cluster"]

_KINDS: Mapping[str, Kind] = {
    "redis": "server",
    "rediss": "server",
    "unix": "unix",
    "redis+sentinel": "sentinel",
    "rediss+sentinel": "sentinel",
    "redis+cluster": "cluster",
    "rediss+cluster": "cluster",
}
_DEFAULT_PORTS: Mapping[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
_FILE_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
_TLS_OPTIONS = (*_FILE_OPTIONS, "ssl_cert_reqs", "ssl_check_hostname")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_CERT_REQS = ("required", "optional", "none")
_TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_HINT = "characters such as / ? # @ : in a password are written percent-encoded"


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A server's, or those of Sentinels or nodes of a cluster. `tls` is None without TLS."""

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    db: int = 0
    service: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: Mapping[str, str | bool] | None = None


def parse_redis_url(url: str) -> RedisAddress:
    """Raises ConfigError, which says what is wrong with the URL and never shows its password."""
    try:
        return _parse(_read(url[1:]) if url.startswith("@") else url)
    except _BadUrlError as error:
        # `from None`: the traceback of what went wrong may hold parts of the password.
        raise ConfigError(f"--redis {redacted(url)}: {error}") from None


def redacted(url: str) -> str:
    """The URL as it may be shown. What cannot be read hides too much rather than too little."""
    scheme, separator, rest = url.rpartition("://") if url.count("://") == 1 else ("", "", url)
    user, at, where = rest.rpartition("@")
    if at and ":" in user:
        user = f"{user.partition(':')[0]}:***"
    where = re.sub(r"(password=)[^&]*", r"\1***", where)
    return f"{scheme}{separator}{user}{at}{where}"


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise _BadUrlError("cannot be read") from None


class _BadUrlError(Exception):
    """What is wrong, in words without a password."""


def _parse(url: str) -> RedisAddress:
    scheme, separator, rest = url.partition("://")
    kind = _KINDS.get(scheme) if separator else None
    if kind is None:
        raise _BadUrlError(f"begins with none of {', '.join(f'{each}://' for each in _KINDS)}")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    credentials, _, where = authority.rpartition("@")
    username, _, password = credentials.partition(":")
    tls, options = _options(query, kind, with_tls=scheme.startswith("rediss"))
    service, db = _service_and_db(kind, path, options.get("db", ""))
    if kind == "unix" and (where or not path):
        raise _BadUrlError("is not of the form unix:///path/of/the/socket")
    return RedisAddress(
        kind=kind,
        hosts=() if kind == "unix" else _hosts(where, kind),
        path=f"/{unquote(path)}" if kind == "unix" else "",
        db=db,
        service=service,
        username=unquote(username) or None,
        password=unquote(password) or None,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls=tls,
    )


def _hosts(where: str, kind: Kind) -> tuple[tuple[str, int], ...]:
    if kind == "server" and "," in where:
        raise _BadUrlError("names several hosts; say redis+sentinel:// or redis+cluster:// for what they are")
    return tuple(_host(each, _DEFAULT_PORTS[kind]) for each in where.split(","))


def _host(where: str, default_port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\[\]:#]+)(?::([0-9]{1,5}))?", where)
    if match is None or not 0 < int(match[2] or default_port) < 65536:
        raise _BadUrlError(f"has a host that is not of the form host:port ({_HINT})")
    return unquote(match[1].strip("[]")), int(match[2] or default_port)


def _service_and_db(kind: Kind, path: str, db_option: str) -> tuple[str, int]:
    if kind == "unix":
        return "", _db(db_option)
    if kind == "sentinel":
        service, _, db = path.partition("/")
        if not service:
            raise _BadUrlError(
                "names no service; it follows the Sentinels, as in redis+sentinel://host/mymaster"
            )
        return unquote(service), _db(db)
    if kind == "cluster" and path.strip("/") not in {"", "0"}:
        raise _BadUrlError("names a database, and a Redis Cluster has but one; leave it out")
    return "", _db(path.rstrip("/"))


def _db(text: str) -> int:
    if not re.fullmatch(r"[0-9]{0,4}", text):
        raise _BadUrlError("has a database that is not a number")
    return int(text or 0)


def _options(
    query: str, kind: Kind, *, with_tls: bool
) -> tuple[Mapping[str, str | bool] | None, dict[str, str]]:
    """The TLS options, None without TLS, and the others."""
    known = {
        *(_TLS_OPTIONS if with_tls else ()),
        *(_SENTINEL_OPTIONS if kind == "sentinel" else ()),
        *(("db",) if kind == "unix" else ()),
    }
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(given.keys() - known)
    if unknown:
        # With an @ behind the ? it may be part of a password.
        name = f" {unknown[0]}" if re.fullmatch(r"[a-z_]{1,24}", unknown[0]) and "@" not in query else ""
        listed = f"it may have {', '.join(sorted(known))}" if known else "it may have none"
        raise _BadUrlError(f"has an option{name} that is not known here; {listed} ({_HINT})")
    tls = {name: _tls_option(name, given.pop(name)) for name in _TLS_OPTIONS if name in given}
    return (tls if with_tls else None), given


def _tls_option(name: str, value: str) -> str | bool:
    if name == "ssl_check_hostname":
        if value.lower() not in _TRUTHS:
            raise _BadUrlError(f"has {name}={value}, which is neither true nor false")
        return _TRUTHS[value.lower()]
    if name == "ssl_cert_reqs" and value not in _CERT_REQS:
        raise _BadUrlError(f"has {name}={value}, which is none of {', '.join(_CERT_REQS)}")
    if name in _FILE_OPTIONS and not Path(value).is_file():
        raise _BadUrlError(f"has {name}={value}, and there is no such file")
    return value
