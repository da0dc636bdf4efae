"""Who says where workers are, on a clock of the test's own: the settings and DNS. Redis is in tests/prefix_index/test_registration.py."""

import asyncio
import socket
from collections.abc import Sequence

import pytest

from router.places import parse_places
from router.worker_sources import DnsSource, StaticSource, WorkerSource, resolve, sources_of
from tests.virtual_time import in_virtual_time, virtual_clock


class ScriptedResolver:
    """Gives one answer after the other, the last one for ever; an error is raised."""

    def __init__(self, answers: Sequence[Sequence[str] | Exception]) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[float, str]] = []

    async def __call__(self, host: str) -> frozenset[str]:
        """When it was asked is kept."""
        self.asked.append((virtual_clock(), host))
        answer = self._answers[0] if len(self._answers) == 1 else self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return frozenset(answer)


async def first_sets(source: WorkerSource, count: int) -> list[set[str] | None]:
    """What a source says the first times."""
    said: list[set[str] | None] = []
    async for addresses in source.sets():
        said.append(None if addresses is None else set(addresses))
        if len(said) == count:
            return said
    return said


@in_virtual_time
async def test_settings_name_their_addresses_once() -> None:
    """They do not change, and it costs nothing to look after them."""
    assert await first_sets(StaticSource(frozenset({"a:1", "b:1"})), 5) == [{"a:1", "b:1"}]


@in_virtual_time
async def test_a_name_is_looked_up_again_and_again() -> None:
    """Every address of both families has the one port; what comes and goes in DNS comes and goes here."""
    resolver = ScriptedResolver([["10.0.0.1"], ["10.0.0.1", "fd00::2"], ["fd00::2"]])
    source = DnsSource("prefill.example", 7001, 5.0, resolver)
    assert await first_sets(source, 3) == [
        {"10.0.0.1:7001"},
        {"10.0.0.1:7001", "[fd00::2]:7001"},
        {"[fd00::2]:7001"},
    ]
    assert resolver.asked == [(0, "prefill.example"), (5, "prefill.example"), (10, "prefill.example")]


@in_virtual_time
async def test_a_name_that_does_not_resolve_says_nothing() -> None:
    """No server, no such name, a name that cannot be, a name without addresses: none of it says that nobody is there."""
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    later = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
    label = UnicodeError("label too long")
    resolver = ScriptedResolver(
        [["10.0.0.1"], unknown, later, label, [], OSError("no network"), ["10.0.0.2"]]
    )
    said = await first_sets(DnsSource("x", 1, 5.0, resolver), 7)
    assert said == [{"10.0.0.1:1"}, None, None, None, None, None, {"10.0.0.2:1"}]


@in_virtual_time
async def test_a_slow_server_is_asked_one_question_at_a_time() -> None:
    """The next look-up begins after the last one has ended."""
    asked: list[float] = []

    async def slow(_: str) -> frozenset[str]:
        """Takes longer than the pause between two look-ups."""
        asked.append(virtual_clock())
        await asyncio.sleep(30)
        return frozenset({"10.0.0.1"})

    await first_sets(DnsSource("x", 1, 5.0, slow), 2)
    assert asked == [0, 35]


async def test_this_machine_knows_its_own_name() -> None:
    """The resolver that routers use finds loopback under its name, without a name server."""
    found = await resolve("localhost")
    assert found <= {"127.0.0.1", "::1"}
    assert found
    with pytest.raises(socket.gaierror):
        await resolve("no.such.name.invalid")


def test_each_place_has_a_source() -> None:
    """All addresses are one, each name is one however often it is written; what is written down is expected to be there."""
    places = parse_places("a:1,dns:n:2,b:1,dns:n:2,dns:[::1]:3", "--decode")
    sources = sources_of(places, "decode", None, 2.0)
    assert [(source.name, source.is_fixed) for source in sources] == [
        ("settings", True),
        ("dns:n:2", False),
        ("dns:::1:3", False),
    ]
