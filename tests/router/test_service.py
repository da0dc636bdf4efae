"""The public service on whole workers: what one client is told, and what of it others notice."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NoReturn

import grpc
import pytest

from paceline.core.clock import ManualClock
from paceline.core.errors import PeerLostError
from paceline.core.request import Prompt, SamplingParams, SequenceSpec
from paceline.v1 import generation_pb2, inference_pb2
from router.hash_ring import HashRing, prompt_key
from router.rate_limit import Grant, LocalRateLimiter, Rate
from router.tenants import new_key
from router.tokenizer import Tokenizer
from tests.factories import make_spec
from tests.router.scripted_workers import decode_that, failed
from tests.router.whole import Books, Call, EndedError, WholeRouter, whole_router
from tests.worker.bench import output_of

SEEDED = SamplingParams(seed=4)
PROMPT = tuple(range(20, 38))


@pytest.fixture
async def router(tiny_tokenizer_dir: Path, byte_level: Tokenizer) -> AsyncIterator[WholeRouter]:
    """Every prompt is handed over."""
    async with whole_router(tiny_tokenizer_dir, byte_level) as router:
        yield router


def spec_of(num_candidates: int = 1, max_tokens: int = 40) -> SequenceSpec:
    """What workers make of `request`."""
    candidates = tuple(range(num_candidates))
    return make_spec(
        prompt_ids=PROMPT, max_tokens=max_tokens, sampling=SEEDED, candidates=candidates, ignore_eos=True
    )


def request(max_tokens: int = 40, stop: tuple[str, ...] = (), **fields: Any) -> bytes:
    """A seeded request."""
    return inference_pb2.GenerateRequest(
        sampling=generation_pb2.SamplingParams(seed=4, temperature=1),
        stopping=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True, stop=stop),
        **({"token_ids": generation_pb2.TokenIds(ids=PROMPT)} | fields),
    ).SerializeToString()


async def answer(router: WholeRouter, raw: bytes) -> list[inference_pb2.GenerateResponse]:
    """The whole stream."""
    call = Call()
    await router.generate(raw, call)
    return call.responses


async def test_a_stop_string_is_the_last_word_on_its_candidate(
    router: WholeRouter, byte_level: Tokenizer
) -> None:
    """One end each, and nothing of a candidate after its end, whatever its worker still says."""
    texts = [byte_level.decode(output_of(spec_of(2), candidate)) for candidate in (0, 1)]
    stop = next(piece for at in range(4, len(texts[0])) if (piece := texts[0][at : at + 4]) not in texts[1])
    responses = await answer(router, request(n=2, stop=(stop,)))
    ends = {response.index: response.finish for response in responses if response.HasField("finish")}
    assert sum(response.HasField("finish") for response in responses) == 2
    assert (ends[0].stop, ends[1].stop) == (stop, "")
    for index, whole in enumerate((texts[0].partition(stop)[0], texts[1])):
        own = [response for response in responses if response.index == index]
        assert "".join(response.delta.text for response in own) == whole
        assert own[-1].HasField("finish")
    await router.until_idle()


@pytest.mark.parametrize("disaggregate", ["always", "never"])
async def test_a_long_prompt_says_how_far_it_is_until_it_is_done(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, disaggregate: str
) -> None:
    """Eighteen tokens at eight a step, whoever computes them: progress, then the first token, and that the prompt is done."""
    async with whole_router(tiny_tokenizer_dir, byte_level, disaggregate=disaggregate) as router:
        responses = await answer(router, request())
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[:5] == ["accepted", "progress", "progress", "delta", "prefill_done"]
    progress = [response.progress for response in responses if response.HasField("progress")]
    assert [(each.computed_tokens, each.prompt_tokens) for each in progress] == [(8, 18), (16, 18)]


async def test_the_clients_own_name_for_a_request_is_a_label(router: WholeRouter) -> None:
    """Requests of one name at once are as many requests: each with an id of the server's, and its whole answer."""
    raw = request(client_request_id="mine")
    streams = await asyncio.gather(*(answer(router, raw) for _ in range(8)))
    assert len({responses[0].accepted.request_id for responses in streams}) == 8
    for responses in streams:
        token_ids = [token for response in responses for token in response.delta.token_ids]
        assert token_ids == list(output_of(spec_of()))


@pytest.mark.parametrize("num_decoded", [0, 2])
async def test_what_we_have_lost_costs_only_the_tokens_that_came(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, tmp_path: Path, num_decoded: int
) -> None:
    """A prompt whose answer no worker has ended is not charged; what its client has got of the answer is."""
    key, digest = new_key()
    file = tmp_path / "tenants.toml"
    file.write_text(f'[tenants.acme]\nkey_hashes = ["{digest}"]\ntokens_per_minute = 1000\n')
    limiter, names = LocalRateLimiter(ManualClock()), ("decode-0", "decode-lost")
    # Begins so that it belongs to the worker that loses it.
    prompt = next(
        (n, *PROMPT)
        for n in range(100)
        if next(HashRing.of(names).walk(prompt_key((n, *PROMPT), ""))) == names[1]
    )
    call = Call((("authorization", f"Bearer {key}"),))
    async with whole_router(
        tiny_tokenizer_dir,
        byte_level,
        scripted=names[1:],
        books=Books(limiter),
        tenants=str(file),
        disaggregate="never",
        max_attempts=1,
    ) as router:
        lost = router.scripted[names[1]]
        lost.decode_scripts.append(decode_that(num_decoded, failed(PeerLostError("gone"))))
        with pytest.raises(EndedError) as caught:
            await router.generate(request(token_ids=generation_pb2.TokenIds(ids=prompt)), call)
    assert (caught.value.reason, len(lost.submits)) == ("PEER_LOST", 1)
    num_tokens = sum(len(response.delta.token_ids) for response in call.responses)
    rate = Rate(1000, 1000)
    assert limiter.pour("tokens:{acme}", rate, 1000 - num_tokens) == 0
    assert limiter.pour("tokens:{acme}", rate, 1) > 0


class Deaf(Call):
    """A call whose client takes nothing, not even its end."""

    async def abort_with_status(self, status: Any) -> NoReturn:
        """Waits for ever."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")


async def test_a_client_that_does_not_hear_its_end_keeps_nothing_here(router: WholeRouter) -> None:
    """The handler ends all the same, and lets go of all that the client has sent."""
    async with asyncio.timeout(20):
        await router.generate(b"no request", Deaf())
    assert router.service.stats().num_ended == {"BAD_PROMPT": 1}


class Broken(Call):
    """A call with which something of ours cannot cope."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Fails with words that nobody has checked."""
        raise RuntimeError("the prompt was: a secret")


async def test_a_bug_has_a_status_and_a_reason(router: WholeRouter) -> None:
    """INVARIANT, without the words of the exception, and counted; the next request is served."""
    with pytest.raises(EndedError) as caught:
        await router.generate(request(), Broken())
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.INTERNAL, "INVARIANT")
    assert "secret" not in str(caught.value)
    assert router.service.stats().num_ended == {"INVARIANT": 1}
    assert (await answer(router, request()))[-1].HasField("finish")


class Slow(LocalRateLimiter):
    """Lets somebody in once it is read what they want."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = asyncio.Event()

    async def take(self, name: str, rate: Rate, cost: int) -> Grant:
        """See RateLimiter."""
        await self.is_read.wait()
        return await super().take(name, rate, cost)


async def test_what_is_short_is_read_while_its_tenant_is_asked_for(
    tiny_tokenizer_dir: Path, byte_level: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or nobody would be let in here."""
    limiter, (key, digest) = Slow(), new_key()
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[tenants.acme]\nkey_hashes = ["{digest}"]\nrequests_per_minute = 9\n')

    async def aencode(prompt: Prompt) -> tuple[int, ...]:
        """Tells when it is."""
        limiter.is_read.set()
        return byte_level.encode(prompt)

    monkeypatch.setattr(byte_level, "aencode", aencode)
    books, call = Books(limiter), Call((("authorization", f"Bearer {key}"),))
    async with whole_router(tiny_tokenizer_dir, byte_level, books=books, tenants=str(tenants)) as router:
        async with asyncio.timeout(20):
            await router.generate(request(max_tokens=3), call)
    assert call.responses[-1].HasField("finish")
