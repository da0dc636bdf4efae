"""Tenants by their keys, and the file that says who they are."""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from paceline.core.errors import ConfigError, ScopeForbiddenError, TenantUnknownError
from paceline.core.request import Priority
from paceline.runtime.reload import reloading
from router import make_key
from router.rate_limit import Rate
from router.reload import reload_tenants
from router.tenants import ANONYMOUS, Tenant, Tenants, TenantTable, new_key, read_tenants

KEY, HASH = new_key()
OTHER_KEY, OTHER_HASH = new_key()


def bearer(key: str) -> list[tuple[str, str | bytes]]:
    """The metadata of a call with a key."""
    return [("user-agent", "test"), ("authorization", f"Bearer {key}")]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Two tenants."""
    path = tmp_path / "tenants.toml"
    path.write_text(
        f'[tenants.acme]\nkey_hashes = ["{HASH}"]\n[tenants.other]\nkey_hashes = ["{OTHER_HASH}"]\n'
    )
    return path


def test_a_key_says_whose_call_it_is(file: Path) -> None:
    """Each key finds its tenant; the word Bearer may be written in any case."""
    tenants = Tenants(str(file))
    assert tenants.of_call(bearer(KEY)).name == "acme"
    assert tenants.of_call([("authorization", f"bearer {OTHER_KEY}")]).name == "other"


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        bearer(""),
        bearer("paceline-wrong"),
        bearer(KEY[:-1]),
        bearer(HASH),
        [("authorization", KEY)],
        [("authorization", f"Basic {KEY}")],
        [*bearer(KEY), ("authorization", f"Bearer {OTHER_KEY}")],
        [("authorization", f"Bearer {KEY}".encode())],
    ],
)
def test_a_call_without_a_known_key_is_nobodys(
    file: Path, metadata: list[tuple[str, str | bytes]] | None
) -> None:
    """No key, a wrong or cut one, the hash in its place, another form, two keys: all are refused, and no message shows a key."""
    with pytest.raises(TenantUnknownError) as caught:
        Tenants(str(file)).of_call(metadata)
    assert KEY[:-1] not in str(caught.value)
    assert "wrong" not in str(caught.value).replace("wrongly", "")


def test_the_whole_digest_counts() -> None:
    """One that begins alike, by which it is looked for, is another key's."""
    digest = bytes.fromhex(HASH.removeprefix("sha256:"))
    alike = TenantTable([(digest[:-1] + bytes([digest[-1] ^ 1]), Tenant("acme"))])
    assert alike.find(KEY) is None
    assert TenantTable([(digest, Tenant("acme"))]).find(KEY) == Tenant("acme")


def test_without_a_file_everybody_is_one_anonymous_tenant() -> None:
    """It has no name and no limit; a key is not looked at."""
    assert Tenants().of_call(None) is Tenants().of_call(bearer(KEY)) is ANONYMOUS
    assert (ANONYMOUS.name, ANONYMOUS.requests, ANONYMOUS.tokens) == ("", None, None)


def test_a_tenant_has_what_its_table_says(file: Path) -> None:
    """Limits are absent unless given; a burst that is not given is a minute's worth; several keys are one tenant's."""
    file.write_text(
        f'[tenants.acme]\nkey_hashes = ["{HASH}", "{OTHER_HASH}"]\nrequests_per_minute = 60\nburst_requests = 5\n'
        'tokens_per_minute = 9000\nmax_concurrent = 3\nmax_output_tokens = 100\nweight = 4\npriorities = ["batch", "standard"]\n'
    )
    tenant = read_tenants(str(file)).find(KEY)
    assert tenant is not None
    assert tenant is read_tenants(str(file)).find(OTHER_KEY) or tenant == read_tenants(str(file)).find(
        OTHER_KEY
    )
    assert (tenant.requests, tenant.tokens) == (Rate(60, 5), Rate(9000, 9000))
    assert (tenant.max_concurrent, tenant.max_output_tokens, tenant.weight) == (3, 100, 4)
    tenant.require_priority(Priority.BATCH)
    with pytest.raises(ScopeForbiddenError, match="PRIORITY_BATCH, PRIORITY_STANDARD"):
        tenant.require_priority(Priority.REALTIME)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "one table for each tenant"),
        ("tenants = 3", "one table for each tenant"),
        ("[tenants]\n[other]\n", "one table for each tenant"),
        ("[tenants.acme", "not valid TOML"),
        pytest.param(f"number = {'9' * 5000}", "not valid TOML", id="a number of 5,000 digits"),
        pytest.param(f"lists = {'[' * 3000}", "not valid TOML", id="3,000 lists in each other"),
        ("[tenants.acme]\n", "key_hashes"),
        ("[tenants.acme]\nkey_hashes = []\n", "key_hashes"),
        ('[tenants.acme]\nkey_hashes = ["SECRET"]\n', "key_hashes"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}", "{HASH}"]\n', "twice"),
        (f'[tenants.a]\nkey_hashes = ["{HASH}"]\n[tenants.b]\nkey_hashes = ["{HASH}"]\n', "one of a's"),
        (f'[tenants."a b"]\nkey_hashes = ["{HASH}"]\n', "letters"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\nrequest_rate = 3\n', "no setting 'request_rate'"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\nweight = 0\n', "weight must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\nmax_concurrent = 0\n', "max_concurrent must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\nmax_concurrent = true\n', "max_concurrent must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\ntokens_per_minute = 1.5\n', "tokens_per_minute must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\nburst_tokens = 5\n', "burst_tokens means nothing"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\npriorities = ["urgent"]\n', "priorities must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\npriorities = [["batch"]]\n', "priorities must be"),
        (f'[tenants.acme]\nkey_hashes = ["{HASH}"]\npriorities = []\n', "priorities must be"),
    ],
)
def test_a_broken_file_is_refused_with_what_is_wrong(file: Path, content: str, problem: str) -> None:
    """Nothing in it is ignored, and what stands in the place of a hash is not shown: it may be a key."""
    file.write_text(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        Tenants(str(file))
    assert str(file) in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """With the name of the setting and of the file."""
    with pytest.raises(ConfigError, match=r"--tenants: cannot read .*nowhere"):
        Tenants(str(tmp_path / "nowhere"))


def test_a_key_of_any_length_is_not_hashed(file: Path) -> None:
    """What is longer than any key is not one, and is not shown; one that is as long as may be is looked up."""
    tenants = Tenants(str(file))
    for key in ("x" * 512, "x" * 513, "x" * 16000):
        with pytest.raises(TenantUnknownError) as caught:
            tenants.of_call(bearer(key))
        assert "xx" not in str(caught.value)
        assert ("not of the form" in str(caught.value)) == (len(key) > 512)


def test_a_new_reading_replaces_the_old_one_or_is_refused(file: Path) -> None:
    """A key that is gone is unknown from then on; a broken file is logged, and what was read before stays."""
    tenants = Tenants(str(file))
    file.write_text(f'[tenants.acme]\nkey_hashes = ["{OTHER_HASH}"]\n')
    with capture_logs() as logs:
        reload_tenants(tenants)
    assert logs == [{"event": "tenants_loaded", "log_level": "info", "num_tenants": 1}]
    assert tenants.of_call(bearer(OTHER_KEY)).name == "acme"
    with pytest.raises(TenantUnknownError):
        tenants.of_call(bearer(KEY))
    file.write_text("[tenants.acme")
    with capture_logs() as logs:
        reload_tenants(tenants)
    assert [entry["event"] for entry in logs] == ["tenants_refused"]
    assert "not valid TOML" in logs[0]["problem"]
    assert tenants.of_call(bearer(OTHER_KEY)).name == "acme"


async def test_sighup_reads_the_file_again(file: Path) -> None:
    """A signal to the process is enough, and one after the block has its usual meaning."""
    tenants = Tenants(str(file))
    with reloading([partial(reload_tenants, tenants)]):
        file.write_text(f'[tenants.new]\nkey_hashes = ["{HASH}"]\n')
        os.kill(os.getpid(), signal.SIGHUP)
        while tenants.num_tenants != 1:  # noqa: ASYNC110 - there is no event: it is a signal
            await asyncio.sleep(0)
    assert tenants.of_call(bearer(KEY)).name == "new"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


def test_a_made_key_is_known_by_the_lines_that_come_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `./run key` prints is a file of tenants as it stands, with the key in a comment."""
    assert make_key.main(["acme"]) == 0
    printed = capsys.readouterr().out
    file = tmp_path / "tenants.toml"
    file.write_text(printed)
    (key,) = (word for word in printed.split() if word.startswith("paceline-"))
    assert Tenants(str(file)).of_call(bearer(key)).name == "acme"


def test_keys_are_random() -> None:
    """No two are alike, and they are long enough not to be guessed."""
    keys = {new_key()[0] for _ in range(100)}
    assert len(keys) == 100
    assert all(len(key) > 43 for key in keys)
