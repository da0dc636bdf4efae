"""The scope of a request comes from its tenant and the operator's prefixes, and from nothing that a client could choose."""

import json
from pathlib import Path

import pytest

from paceline.core.cache_scope import CacheScope
from paceline.core.errors import BadPromptError, ConfigError
from router.cache_scopes import CacheScopes, read_public_prefixes, read_salt
from router.tokenizer import Tokenizer

SECRET = b"0123456789abcdef"
GREETING = (5, 6, 7, 8, 9, 10)
SCOPES = CacheScopes(SECRET, {"greeting": GREETING})


def scope(tenant: str, name: str | None, prompt: tuple[int, ...], scopes: CacheScopes = SCOPES) -> CacheScope:
    """Out of its text."""
    return CacheScope.parse(scopes.scope_of(name, prompt, tenant))


def test_each_tenant_has_a_salt_that_only_the_secret_gives() -> None:
    """The same tenant has the same salt on every router with the secret; others, and another secret, give another one."""
    salt = scope("anne", None, (1, 2)).salt
    assert salt == scope("anne", None, (3,), CacheScopes(SECRET)).salt
    assert salt != scope("bert", None, (1, 2)).salt
    assert salt != scope("anne", None, (1, 2), CacheScopes(SECRET[::-1])).salt
    assert len(salt) == 32
    assert scope("anne", None, (1, 2)).num_public_tokens == 0


def test_a_prompt_that_begins_with_a_named_prefix_shares_it() -> None:
    """Its six tokens are public, whatever follows them and however large a worker's blocks are."""
    for prompt in (GREETING, (*GREETING, 1, 2, 3)):
        assert scope("anne", "greeting", prompt) == CacheScope(scope("anne", None, prompt).salt, 6)


@pytest.mark.parametrize("prompt", [GREETING[:5], (1, *GREETING), (*GREETING[:5], 11), (1,)])
def test_a_prompt_that_begins_otherwise_shares_nothing(prompt: tuple[int, ...]) -> None:
    """Naming a prefix opens nothing by itself: all of its tokens must be there."""
    assert scope("anne", "greeting", prompt) == scope("anne", None, prompt)


@pytest.mark.parametrize("name", ["", "other", "x" * 1000])
@pytest.mark.parametrize("scopes", [SCOPES, CacheScopes()])
def test_an_unknown_name_is_refused(name: str, scopes: CacheScopes) -> None:
    """Also where everything is shared anyway; the error names the field, and does not repeat an endless name."""
    with pytest.raises(BadPromptError, match=r"cache\.public_prefix") as caught:
        scope("anne", name, GREETING, scopes)
    assert len(str(caught.value)) < 200


def test_without_a_secret_everything_is_shared() -> None:
    """One scope for all, with and without a public prefix."""
    scopes = CacheScopes(b"", {"greeting": GREETING})
    assert {scopes.scope_of(name, GREETING, tenant) for tenant in "ab" for name in (None, "greeting")} == {""}


def test_a_secret_is_read_from_a_file(tmp_path: Path) -> None:
    """White space around it does not count; no file is no secret."""
    file = tmp_path / "salt"
    file.write_bytes(SECRET + b"\n")
    assert read_salt(str(file)) == SECRET
    assert read_salt("") == b""


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 65])
def test_a_secret_of_another_size_is_refused_and_not_shown(tmp_path: Path, content: bytes) -> None:
    """The error says how many bytes a secret has, and which the file has."""
    file = tmp_path / "salt"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--cache-salt-file: .* has {len(content)} bytes") as caught:
        read_salt(str(file))
    assert not content or content.decode() not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_salt(str(tmp_path / "none"))


def test_prefixes_are_read_as_tokens_or_text(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A text is tokenised as a prompt is; blank lines do not count."""
    file = tmp_path / "public.jsonl"
    lines = [{"name": "ids", "token_ids": [3, 4, 5]}, {"name": "words", "text": "hello world"}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    found = read_public_prefixes(str(file), tokenizer)
    assert found == {"ids": (3, 4, 5), "words": tokenizer.encode("hello world")}
    assert read_public_prefixes("", tokenizer) == {}


BAD_LINES = [
    "nonsense",
    "[]",
    '{"name": "x"}',
    '{"name": "x", "token_ids": []}',
    '{"name": "x", "token_ids": [true]}',
    '{"name": "x", "token_ids": [-1]}',
    '{"name": "x", "token_ids": [123456789]}',
    '{"name": "x", "text": ""}',
    '{"name": "", "text": "hello"}',
    '{"name": 3, "text": "hello"}',
    '{"name": "x", "text": "hello", "token_ids": [1]}',
    json.dumps({"name": "x" * 65, "text": "hello"}),
    '{"name": "good", "text": "again"}',
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, byte_level: Tokenizer, line: str) -> None:
    """The error names file and line."""
    file = tmp_path / "public.jsonl"
    file.write_text(f'{{"name": "good", "text": "hello"}}\n{line}\n')
    with pytest.raises(ConfigError, match=r"--public-prefixes: .*public\.jsonl, line 2"):
        read_public_prefixes(str(file), byte_level)


def test_a_file_without_prefixes_is_refused(tmp_path: Path, byte_level: Tokenizer) -> None:
    """An empty file is a mistake, and one that is not there is too."""
    file = tmp_path / "public.jsonl"
    file.write_text("\n")
    with pytest.raises(ConfigError, match="has no line"):
        read_public_prefixes(str(file), byte_level)
    with pytest.raises(ConfigError, match="cannot read"):
        read_public_prefixes(str(tmp_path / "none"), byte_level)
