"""Whose cached blocks a request may share: a salt for each tenant, and the prefixes that the operator shares between them.

A salt is a digest of the tenant, keyed with a secret that routers share. Nothing of it comes from the client.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.core.cache_scope import CacheScope
from paceline.core.errors import BadPromptError, ConfigError
from router.tokenizer import Tokenizer

_SALT_SETTING, _PREFIXES_SETTING = "--cache-salt-file", "--public-prefixes"
_MIN_SECRET_BYTES, _MAX_SECRET_BYTES = 16, 64
_MAX_NAME = 64
_FORM = '{"name": "greeting", "token_ids": [1, 2, 3]} or {"name": "greeting", "text": "Hello"}'

Prefix = tuple[int, ...]


class CacheScopes:
    """Makes the scope of each request. Without a secret all tenants are one scope, which is public."""

    def __init__(self, secret: bytes = b"", prefixes: Mapping[str, Prefix] | None = None) -> None:
        self._secret = secret
        self._prefixes = dict(prefixes or {})

    def scope_of(self, public_prefix: str | None, prompt_ids: Prefix, tenant: str = "") -> str:
        """The scope of a tenant's prompt; requests without a name are one tenant's. Raises BadPromptError for a prefix that nobody has registered.

        Of a public prefix whole blocks are shared, and only if the prompt begins with all of its tokens.
        """
        num_public = 0
        if public_prefix is not None:
            tokens = self._named(public_prefix)
            if prompt_ids[: len(tokens)] == tokens:
                num_public = len(tokens)
        if not self._secret:
            return ""
        return str(CacheScope(self._salt(tenant), num_public))

    def _named(self, name: str) -> Prefix:
        tokens = self._prefixes.get(name)
        if tokens is None:
            raise BadPromptError(
                f"cache.public_prefix {name[:_MAX_NAME]!r} is no prefix of this server; name one of its operator's, or none"
            )
        return tokens

    def _salt(self, tenant: str) -> str:
        digest = hashlib.blake2b(tenant.encode(), digest_size=16, key=self._secret, person=b"paceline.scope")
        return digest.hexdigest()


def read_salt(file: str) -> bytes:
    """The secret in a file, without the white space around it; none for no file. Raises ConfigError, which does not show it."""
    if not file:
        return b""
    try:
        secret = Path(file).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{_SALT_SETTING}: cannot read {file}: {error.strerror}") from error
    if not _MIN_SECRET_BYTES <= len(secret) <= _MAX_SECRET_BYTES:
        raise ConfigError(
            f"{_SALT_SETTING}: {file} has {len(secret)} bytes, and a secret has {_MIN_SECRET_BYTES} to {_MAX_SECRET_BYTES}; "
            "make one with: openssl rand -hex 16"
        )
    return secret


def read_public_prefixes(file: str, tokenizer: Tokenizer) -> dict[str, Prefix]:
    """The prefixes of a JSON Lines file, by name; none for no file. Raises ConfigError, which names the line."""
    if not file:
        return {}
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_PREFIXES_SETTING}: cannot read {file}: {error}") from error
    prefixes: dict[str, Prefix] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            name, tokens = _parse(f"{_PREFIXES_SETTING}: {file}, line {number}", line, tokenizer)
            if name in prefixes:
                raise ConfigError(f"{_PREFIXES_SETTING}: {file}, line {number} names {name!r} again")
            prefixes[name] = tokens
    if not prefixes:
        raise ConfigError(f"{_PREFIXES_SETTING}: {file} has no line; give each prefix one, {_FORM}")
    return prefixes


def _parse(where: str, line: str, tokenizer: Tokenizer) -> tuple[str, Prefix]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    name, prompt = _fields(entry)
    if not name or not prompt:
        raise ConfigError(
            f"{where} is not of the form {_FORM}, with a name of at most {_MAX_NAME} characters"
        )
    try:
        return name, tokenizer.encode(prompt)
    except BadPromptError as error:
        raise ConfigError(f"{where}: {error}") from error


def _fields(entry: Any) -> tuple[str, str | Prefix]:
    """A name, and a text or tokens; empty where the entry has none."""
    if not isinstance(entry, dict) or len(entry) != 2:
        return "", ""
    name, text, ids = entry.get("name"), entry.get("text"), entry.get("token_ids")
    # Not isinstance: a bool is an int to Python, and a mistake to us.
    tokens = tuple(ids) if isinstance(ids, list) and all(type(each) is int for each in ids) else ()
    if not isinstance(name, str) or len(name) > _MAX_NAME:
        return "", ""
    return name, text if isinstance(text, str) else tokens
