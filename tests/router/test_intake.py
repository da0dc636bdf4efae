"""What becomes of a tenant's request before the first worker hears of it."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from paceline.core.clock import ManualClock, monotonic
from paceline.core.errors import (
    BadStopError,
    InvalidRequestError,
    PacelineError,
    PromptTooLongError,
    RateLimitedError,
    ScopeForbiddenError,
)
from paceline.core.request import Priority, Prompt, RequestId, SequenceSpec
from paceline.prefix_index.redis_calls import RedisCalls
from paceline.v1 import generation_pb2, inference_pb2
from router.admission import AdmissionController, Door
from router.cache_scopes import CacheScopes
from router.gate import Gate
from router.in_time import Bounds
from router.intake import Intake
from router.job import Job
from router.placement import Rules
from router.rate_limit import MINUTE_US, LocalRateLimiter, Rate, RateLimiter, RedisRateLimiter
from router.slots import LocalSlots
from router.tenants import Tenant
from router.tokenizer import Tokenizer
from tests.router.cluster import scripted_cluster

ACME = Tenant("acme")
RATED = Tenant("acme", requests=Rate(1, 1))


class Desk:
    """An intake behind a door, on a clock that stands."""

    def __init__(self, intake: Intake, limiter: RateLimiter | None = None) -> None:
        self.intake = intake
        limiter = limiter or LocalRateLimiter(ManualClock(1000.0))
        self._admission = AdmissionController(Door(9), limiter, LocalSlots())

    async def read(
        self, tenant: Tenant, *, used: int = 0, time_left_s: float | None = None, **fields: Any
    ) -> SequenceSpec:
        """The work that a request of ten tokens becomes; in the end it has used so many."""
        request = inference_pb2.GenerateRequest(
            token_ids=generation_pb2.TokenIds(ids=range(10)),
            **fields,
        )
        raw = request.SerializeToString()
        return (await self.read_raw(raw, tenant, used=used, time_left_s=time_left_s)).spec

    async def read_raw(
        self, raw: bytes, tenant: Tenant, *, used: int = 0, time_left_s: float | None = None
    ) -> Job:
        """The same for any bytes, and what else is known of it."""
        with self.intake.reading(raw, tenant) as reading:
            async with self._admission.admit(tenant, len(raw)) as visit:
                call = await self.intake.take(reading, RequestId("r"), visit, time_left_s)
                visit.use(used)
                return call.job

    async def refused(self, tenant: Tenant, **fields: Any) -> PacelineError:
        """Why a request is not taken."""
        with pytest.raises(PacelineError) as caught:
            await self.read(tenant, **fields)
        return caught.value


def behind_redis(desk: Desk, answer: Callable[[], Awaitable[int]]) -> Desk:
    """The same with rates in a Redis that answers so."""
    calls = RedisCalls("unix:///nowhere")
    setattr(calls, "run_script", lambda *_: answer())  # noqa: B010
    return Desk(desk.intake, RedisRateLimiter(calls, budget_s=20.0, num_routers=1))


@pytest.fixture
async def desk(byte_level: Tokenizer) -> AsyncIterator[Desk]:
    """With a secret for salts."""
    async with scripted_cluster() as cluster:
        scopes = CacheScopes(b"0123456789abcdef")
        gate = Gate(Bounds(), Rules(), cluster.registry, cluster.index)
        yield Desk(Intake(cluster.config, byte_level, cluster.registry, scopes, gate))


async def test_the_work_is_its_tenants(desk: Desk) -> None:
    """Whom workers charge, and whose blocks it may share, follow from the tenant alone."""
    acme, again, other = [await desk.read(each) for each in (ACME, ACME, Tenant("other", weight=3))]
    assert (acme.tenant, other.tenant) == ("acme", "other")
    assert (acme.tenant_weight, other.tenant_weight) == (1, 3)
    assert acme.cache_scope == again.cache_scope
    assert acme.cache_scope not in {"", other.cache_scope}


async def test_an_output_is_bounded_by_its_tenants_cap(desk: Desk) -> None:
    """Also one whose request does not say how long it may be."""
    tenant = Tenant("acme", max_output_tokens=7)
    assert (await desk.read(tenant)).max_tokens == 7
    asked = generation_pb2.StopConditions(max_tokens=8)
    assert isinstance(await desk.refused(tenant, stopping=asked), BadStopError)
    assert desk.intake.limits(tenant).max_output_tokens == 7


@pytest.mark.parametrize(
    ("most", "limit"),
    [pytest.param(1 << 20, 16 * 1000, id="of-the-model"), pytest.param(100, 100, id="setting")],
)
async def test_text_is_refused_by_its_bytes_before_its_tokens_are_counted(
    byte_level: Tokenizer, most: int, limit: int
) -> None:
    """Sixteen bytes for each token of the longest request, or what the setting says if that is less."""
    asked = generation_pb2.StopConditions(max_tokens=1)
    async with scripted_cluster(max_prompt_bytes=most) as cluster:
        gate = Gate(Bounds(), Rules(), cluster.registry, cluster.index)
        desk = Desk(Intake(cluster.config, byte_level, cluster.registry, CacheScopes(b""), gate))
        error = await desk.refused(ACME, text="x" * (limit + 1), stopping=asked)
    assert isinstance(error, PromptTooLongError)
    assert error.facts() == {"limit": str(limit), "given": str(limit + 1), "unit": "bytes"}


async def test_a_priority_that_is_for_others_is_refused(desk: Desk) -> None:
    """A request that names none is of the standard one."""
    tenant = Tenant("acme", priorities=frozenset({Priority.BATCH}))
    assert isinstance(await desk.refused(tenant), ScopeForbiddenError)
    spec = await desk.read(tenant, priority=inference_pb2.PRIORITY_BATCH)
    assert spec.priority is Priority.BATCH


async def test_the_most_that_a_request_can_use_is_reserved(desk: Desk) -> None:
    """The prompt, and the longest output of every candidate; what it did not use is there for the next one."""
    asked = generation_pb2.StopConditions(max_tokens=10)
    sampled = generation_pb2.SamplingParams(temperature=1)
    tenant = Tenant("acme", tokens=Rate(60, 40))
    await desk.read(tenant, n=3, stopping=asked, sampling=sampled, used=21)
    assert isinstance(await desk.refused(tenant, stopping=asked), RateLimitedError)
    narrow = Tenant("narrow", tokens=Rate(60, 39))
    error = await desk.refused(narrow, n=3, stopping=asked, sampling=sampled)
    assert isinstance(error, ScopeForbiddenError)
    assert "40 tokens" in str(error)


async def test_a_request_whose_time_is_up_is_no_work(desk: Desk) -> None:
    """DEADLINE_EXCEEDED while queued, and it costs no tokens: the next one has all that there are."""
    tenant = Tenant("acme", tokens=Rate(1, 20))
    asked = generation_pb2.StopConditions(max_tokens=10)
    error = await desk.refused(tenant, time_left_s=0.0, stopping=asked)
    assert error.facts() == {"phase": "queued"}
    assert (await desk.read(tenant, time_left_s=60.0, stopping=asked)).max_tokens == 10


@pytest.mark.parametrize("num_bytes", [1, 100_000])
async def test_what_is_wrong_is_told_to_those_who_are_let_in(desk: Desk, num_bytes: int) -> None:
    """A bad request counts as one, however short it is, and past the rate its sender hears of the rate alone."""
    tenant = Tenant("acme", requests=Rate(1, 2))
    for expected in (InvalidRequestError, InvalidRequestError, RateLimitedError):
        with pytest.raises(PacelineError) as caught:
            await desk.read_raw(b"\xff" * num_bytes, tenant)
        assert isinstance(caught.value, expected)


@pytest.mark.parametrize("num_bytes", [1, 100_000])
async def test_whoever_is_refused_leaves_nothing_to_the_garbage_collector(desk: Desk, num_bytes: int) -> None:
    """All is gone with the error: many bad requests are no reason to look through all that there is."""
    left = list[weakref.ref[InvalidRequestError]]()
    gc.disable()
    try:
        try:
            await desk.read_raw(b"\xff" * num_bytes, Tenant("acme"))
        except InvalidRequestError as error:
            left.append(weakref.ref(error))
        for _ in range(3):
            await asyncio.sleep(0)
        assert [error() for error in left] == [None]
    finally:
        gc.enable()


async def test_what_is_short_is_read_once_redis_has_been_asked(
    desk: Desk, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the answer is on its way, not before the question is."""
    said, is_read = list[str](), asyncio.Event()

    async def answer() -> int:
        """A server's, which lets in whoever has been read meanwhile."""
        said.append("asked")
        await is_read.wait()
        return 0

    async def aencode(prompt: Prompt) -> tuple[int, ...]:
        """Tells when it is."""
        said.append("read")
        is_read.set()
        return byte_level.encode(prompt)

    monkeypatch.setattr(byte_level, "aencode", aencode)
    assert (await behind_redis(desk, answer).read(RATED)).tenant == "acme"
    assert said == ["asked", "read"]


@pytest.mark.parametrize("num_words", [2, 200])
async def test_the_time_to_first_token_begins_before_redis_is_asked(desk: Desk, num_words: int) -> None:
    """However long it takes to answer; the client's deadline is counted from when that was looked at."""
    request, asked_s = inference_pb2.GenerateRequest(text="one " * num_words), list[float]()

    async def answer() -> int:
        """A server's, a while after it was asked."""
        asked_s.append(monotonic())
        return 0

    job = await behind_redis(desk, answer).read_raw(request.SerializeToString(), RATED, time_left_s=60.0)
    assert job.deadline_s is not None
    assert job.timeline.received_s < asked_s[0] < job.deadline_s - 59.0


async def test_whoever_is_refused_hears_of_nothing_else_and_neither_does_the_log(desk: Desk) -> None:
    """A bad request past its rate, which was read before the answer came."""
    complaints = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    async def answer() -> int:
        """A server's, a while after it was asked: a minute."""
        for _ in range(9):
            await asyncio.sleep(0)
        return MINUTE_US

    for _ in range(3):
        with pytest.raises(RateLimitedError):
            await behind_redis(desk, answer).read_raw(b"\xff", RATED)
    gc.collect()
    assert complaints == []


async def test_whoever_is_refused_at_once_is_not_read(
    desk: Desk, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here or at the door: nothing is done for it then."""
    await desk.read(RATED)
    seen = list[Prompt]()

    async def aencode(prompt: Prompt) -> tuple[int, ...]:
        """Tells what is tokenised."""
        seen.append(prompt)
        return byte_level.encode(prompt)

    monkeypatch.setattr(byte_level, "aencode", aencode)
    assert isinstance(await desk.refused(RATED), RateLimitedError)
    for _ in range(3):
        await asyncio.sleep(0)
    assert seen == []


async def test_what_is_long_is_not_read_before_its_sender_is_let_in(
    desk: Desk, byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is short costs less than the refusal."""
    tenant, seen = Tenant("acme"), list[Prompt]()

    async def aencode(prompt: Prompt) -> tuple[int, ...]:
        """Tells what is tokenised."""
        seen.append(prompt)
        return byte_level.encode(prompt)

    monkeypatch.setattr(byte_level, "aencode", aencode)
    for num_words in (2, 2000):
        request = inference_pb2.GenerateRequest(text="word " * num_words)
        with desk.intake.reading(request.SerializeToString(), tenant):
            for _ in range(3):
                await asyncio.sleep(0)
    assert [len(prompt) for prompt in seen] == [len("word ") * 2]
