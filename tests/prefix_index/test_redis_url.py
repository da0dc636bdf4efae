"""What may be said about where a Redis is, and what is said when it is wrong."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.prefix_index.redis_url import RedisAddress, parse_redis_url, redacted

GOOD = [
    ("redis://far", RedisAddress("server", (("far", 6379),))),
    ("redis://far:7000/3", RedisAddress("server", (("far", 7000),), db=3)),
    ("redis://[::1]:7000", RedisAddress("server", (("::1", 7000),))),
    (
        "redis://ann:p%40ss%2F@far/0",
        RedisAddress("server", (("far", 6379),), username="ann", password="p@ss/"),
    ),
    ("redis://:word@far", RedisAddress("server", (("far", 6379),), password="word")),
    ("rediss://far", RedisAddress("server", (("far", 6379),), tls={})),
    (
        "rediss://far?ssl_cert_reqs=none&ssl_check_hostname=false",
        RedisAddress("server", (("far", 6379),), tls={"ssl_cert_reqs": "none", "ssl_check_hostname": False}),
    ),
    ("unix:///run/redis.sock", RedisAddress("unix", path="/run/redis.sock")),
    (
        "unix://ann:word@/run/r.sock?db=2",
        RedisAddress("unix", path="/run/r.sock", db=2, username="ann", password="word"),
    ),
    (
        "redis+sentinel://ann:word@one,two:7/mymaster/1?sentinel_username=s&sentinel_password=t",
        RedisAddress(
            "sentinel",
            (("one", 26379), ("two", 7)),
            db=1,
            service="mymaster",
            username="ann",
            password="word",
            sentinel_username="s",
            sentinel_password="t",
        ),
    ),
    ("rediss+sentinel://one/m", RedisAddress("sentinel", (("one", 26379),), service="m", tls={})),
    ("redis+cluster://one:1,two:2,three", RedisAddress("cluster", (("one", 1), ("two", 2), ("three", 6379)))),
    ("rediss+cluster://one/0", RedisAddress("cluster", (("one", 6379),), tls={})),
]


@pytest.mark.parametrize(("url", "address"), GOOD)
def test_a_good_url_says_where_the_redis_is(url: str, address: RedisAddress) -> None:
    """Every form is read: host, port, database, socket, service, login, and the options of TLS."""
    assert parse_redis_url(url) == address


BAD = [
    ("", "begins with none of redis://, rediss://"),
    ("far:6379", "begins with none of"),
    ("http://far", "begins with none of"),
    ("redis://", "not of the form host:port"),
    ("redis://far:port", "not of the form host:port"),
    ("redis://far:70000", "not of the form host:port"),
    ("redis://far/one", "not a number"),
    ("redis://one,two", "redis\\+sentinel:// or redis\\+cluster://"),
    ("redis://far?db=1", "an option db that is not known"),
    ("redis://far?ssl_ca_certs=/x", "an option ssl_ca_certs that is not known"),
    ("rediss://far?ssl_ca_certs=/nowhere.pem", "there is no such file"),
    ("rediss://far?ssl_cert_reqs=maybe", "none of required, optional, none"),
    ("rediss://far?ssl_check_hostname=maybe", "neither true nor false"),
    ("unix://", "not of the form unix:///path"),
    ("unix://far/path", "not of the form unix:///path"),
    ("redis+sentinel://one", "names no service"),
    ("redis+cluster://one/1", "has but one"),
]


@pytest.mark.parametrize(("url", "problem"), BAD)
def test_a_bad_url_is_refused_with_what_is_wrong(url: str, problem: str) -> None:
    """The error names the setting and the problem."""
    with pytest.raises(ConfigError, match=problem):
        parse_redis_url(url)


def test_a_file_that_is_there_is_taken(tmp_path: Path) -> None:
    """The certificates of the URL are looked for when it is read, not when it is first used."""
    certificate = tmp_path / "ca.pem"
    certificate.write_text("")
    assert parse_redis_url(f"rediss://far?ssl_ca_certs={certificate}").tls == {
        "ssl_ca_certs": str(certificate)
    }


def test_a_url_may_stand_in_a_file(tmp_path: Path) -> None:
    """`@` and a path: it is read from there, and what is wrong with it is said without showing it."""
    file = tmp_path / "redis.url"
    file.write_text("redis://ann:s3cr3t@far:7\n")
    assert parse_redis_url(f"@{file}") == parse_redis_url("redis://ann:s3cr3t@far:7")
    file.write_text("redis://ann:s3cr3t@far:port")
    with pytest.raises(ConfigError, match=f"--redis @{file}: has a host") as caught:
        parse_redis_url(f"@{file}")
    assert "s3cr3t" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_redis_url(f"@{tmp_path / 'none'}")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://u:secret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:secret@h", "redis://:***@h"),
        ("redis://u@h:1", "redis://u@h:1"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("unix:///run/r.sock", "unix:///run/r.sock"),
        (
            "redis+sentinel://a,b/m?sentinel_password=secret&x=1",
            "redis+sentinel://a,b/m?sentinel_password=***&x=1",
        ),
        ("redis://u:se/cr#et?@h", "redis://u:***@h"),
    ],
)
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    """A URL is shown without its passwords, also one whose password should have been encoded."""
    assert redacted(url) == shown


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=6).map(lambda text: f"Q{text}Q"))
def test_no_error_holds_a_password(password: str) -> None:
    """Whatever a password is made of, neither the error, nor its causes, nor the address shows it."""
    url = f"redis://user:{password}@far:port"
    with pytest.raises(ConfigError) as caught:
        parse_redis_url(url)
    assert password not in str(caught.value)
    assert caught.value.__cause__ is None
    assert password not in repr(RedisAddress("server", password=password))
