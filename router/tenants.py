"""Who may use this server, and how much: tenants by API key, out of a TOML file that is read again on SIGHUP.

Keys are known by their digests only. Without a file everybody is one anonymous tenant without limits.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.core.errors import ConfigError, ScopeForbiddenError, TenantUnknownError
from paceline.core.request import Priority
from router.rate_limit import MAX_UNITS, Rate

_SETTING = "--tenants"
_KEY_PREFIX, _HASH_PREFIX = "paceline-", "sha256:"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")
_PRIORITIES = {priority.name.lower(): priority for priority in Priority}
# The first bytes of a digest choose few to compare with; what they tell by timing is of digests, and no way leads back to a key.
_INDEX_BYTES = 4
# Ten times as long as one of ours: nothing longer is worth hashing.
_MAX_KEY_CHARS = 512
_BAD_KEY = "this API key is not known; ask the operator for one"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks, and what they may have. None is no limit."""

    name: str = ""
    requests: Rate | None = None
    tokens: Rate | None = None
    max_concurrent: int | None = None
    max_output_tokens: int | None = None
    weight: int = 1
    priorities: frozenset[Priority] = frozenset(Priority)

    def require_priority(self, priority: Priority) -> None:
        """Raises ScopeForbiddenError for one that the tenant may not use."""
        if priority not in self.priorities:
            allowed = ", ".join(sorted(f"PRIORITY_{each.name}" for each in self.priorities))
            raise ScopeForbiddenError(
                "priority", f"PRIORITY_{priority.name} is not this tenant's to use; it may use {allowed}"
            )


ANONYMOUS = Tenant()


@dataclass(frozen=True, slots=True)
class TenantSettings:
    """A tenant's table in the file. What is absent is no limit; a burst that is absent is what a minute gives."""

    key_hashes: list[str]
    requests_per_minute: int | None = None
    burst_requests: int | None = None
    tokens_per_minute: int | None = None
    burst_tokens: int | None = None
    max_concurrent: int | None = None
    max_output_tokens: int | None = None
    weight: int = 1
    priorities: list[str] | None = None


class TenantTable:
    """The tenants of one reading of the file."""

    def __init__(self, entries: Iterable[tuple[bytes, Tenant]] = ()) -> None:
        self._by_start: defaultdict[bytes, list[tuple[bytes, Tenant]]] = defaultdict(list)
        self.names: set[str] = set()
        for digest, tenant in entries:
            self._by_start[digest[:_INDEX_BYTES]].append((digest, tenant))
            self.names.add(tenant.name)

    def find(self, key: str) -> Tenant | None:
        """Whose key it is."""
        digest = hashlib.sha256(key.encode()).digest()
        found = None
        for stored, tenant in self._by_start.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(stored, digest):
                found = tenant
        return found


class Tenants:
    """Owned by the router's event loop. Without a file there is no key to know."""

    def __init__(self, file: str = "") -> None:
        self._file = file
        self._table = read_tenants(file) if file else TenantTable()

    @property
    def are_known(self) -> bool:
        """Whether a key is needed."""
        return bool(self._file)

    @property
    def num_tenants(self) -> int:
        """In the file."""
        return len(self._table.names)

    def read_again(self) -> None:
        """The file as it is now, for calls that come. Raises ConfigError, and then nothing changes."""
        self._table = read_tenants(self._file)

    def of_call(self, metadata: Iterable[tuple[str, str | bytes]] | None) -> Tenant:
        """Whose call it is; raises TenantUnknownError. Without a file a key is not looked at."""
        if not self._file:
            return ANONYMOUS
        tenant = self._table.find(_bearer(metadata or ()))
        if tenant is None:
            raise TenantUnknownError(_BAD_KEY)
        return tenant


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    given = [value for key, value in metadata if key == "authorization"]
    if len(given) != 1 or not isinstance(given[0], str):
        raise TenantUnknownError(
            "this server needs one API key with each call: send the metadata authorization: Bearer KEY"
        )
    scheme, _, key = given[0].partition(" ")
    if scheme.lower() != "bearer" or not key.strip() or len(key) > _MAX_KEY_CHARS:
        raise TenantUnknownError("the metadata authorization is not of the form Bearer KEY")
    return key.strip()


def new_key() -> tuple[str, str]:
    """A random API key, and its hash for the file."""
    key = _KEY_PREFIX + secrets.token_urlsafe(32)
    return key, _HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def read_tenants(file: str) -> TenantTable:
    """The tenants of a file; raises ConfigError, which says what is wrong where."""
    try:
        content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{_SETTING}: cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        # Also a number of thousands of digits, and lists in lists without end.
        raise ConfigError(f"{_SETTING}: {file} is not valid TOML: {error}") from error
    tenants = content.get("tenants")
    if content.keys() != {"tenants"} or not isinstance(tenants, dict) or not tenants:
        raise ConfigError(
            f"{_SETTING}: {file} must have one table for each tenant, [tenants.NAME], and no other"
        )
    owners: dict[bytes, Tenant] = {}
    for name, entry in tenants.items():
        where = f"{_SETTING}: {file}: [tenants.{name[:64]}]"
        digests, tenant = _parse(where, name, entry)
        for digest in digests:
            if digest in owners:
                raise ConfigError(f"{where} has a key hash twice, or one of {owners[digest].name}'s")
            owners[digest] = tenant
    return TenantTable(owners.items())


def _parse(where: str, name: str, entry: object) -> tuple[list[bytes], Tenant]:
    if not NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits, - and _")
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a table")
    known = [field.name for field in fields(TenantSettings)]
    for key, value in entry.items():
        if key not in known:
            raise ConfigError(f"{where} has no setting {key!r}; known: {', '.join(known)}")
        if key not in {"key_hashes", "priorities"}:
            _require_number(f"{where}: {key}", value)
    digests = _digests(where, entry.get("key_hashes"))
    settings = TenantSettings(**entry)
    return digests, Tenant(
        name=name,
        requests=_rate(where, "requests", settings.requests_per_minute, settings.burst_requests),
        tokens=_rate(where, "tokens", settings.tokens_per_minute, settings.burst_tokens),
        max_concurrent=settings.max_concurrent,
        max_output_tokens=settings.max_output_tokens,
        weight=settings.weight,
        priorities=_priorities(where, settings.priorities),
    )


def _require_number(what: str, value: object) -> None:
    # Not isinstance: a bool is an int to Python, and a mistake to us.
    if type(value) is not int or not 1 <= value <= MAX_UNITS:
        raise ConfigError(f"{what} must be a whole number from 1 to {MAX_UNITS}, not {value!r}")


def _rate(where: str, unit: str, per_minute: int | None, burst: int | None) -> Rate | None:
    if per_minute is None:
        if burst is not None:
            raise ConfigError(f"{where}: burst_{unit} means nothing without {unit}_per_minute")
        return None
    return Rate(per_minute, burst or per_minute)


def _priorities(where: str, names: object) -> frozenset[Priority]:
    if names is None:
        return frozenset(Priority)
    if not isinstance(names, list) or not names or not all(str(name) in _PRIORITIES for name in names):
        raise ConfigError(f"{where}: priorities must be a list with some of {', '.join(_PRIORITIES)}")
    return frozenset(_PRIORITIES[name] for name in names)


def _digests(where: str, hashes: object) -> list[bytes]:
    are_hashes = isinstance(hashes, list) and all(_HASH.fullmatch(str(each)) for each in hashes)
    if not isinstance(hashes, list) or not hashes or not are_hashes:
        # What stands there is not shown: it may be a key.
        raise ConfigError(
            f"{where}: key_hashes must be a list of hashes such as {_HASH_PREFIX}0f3a..; ./run key makes a key and its hash"
        )
    return [bytes.fromhex(each.removeprefix(_HASH_PREFIX)) for each in hashes]
