"""The chaos session sees what it looks for: a changed answer, a lost one, a broken stream; and its relay does what a network does."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from benchmarks.chaos.answers import Answer, BrokenStreamError, Reading
from benchmarks.chaos.load import Expected, Load
from benchmarks.chaos.relay import Relay
from benchmarks.chaos.requests import Asked, make_requests, with_stop
from paceline.client import PacelineClient
from paceline.client_error import PacelineRpcError
from paceline.core.clock import ManualClock
from paceline.v1 import generation_pb2, inference_pb2

Event = inference_pb2.GenerateResponse
ASKED = Asked((1, 2, 3), {"max_tokens": 3})


def _events(*parts: dict[str, Any]) -> list[Event]:
    return [Event(seq=seq, **part) for seq, part in enumerate(parts)]


def _delta(token_id: int, index: int = 0) -> dict[str, Any]:
    return {"index": index, "delta": inference_pb2.Delta(text=f"<{token_id}>", token_ids=[token_id])}


ACCEPTED = {"accepted": inference_pb2.Accepted(request_id="r")}
DONE = {"prefill_done": inference_pb2.PrefillDone(prompt_tokens=3)}
MIGRATED = {"migrated": inference_pb2.Migrated(attempt=1, reason="PEER_LOST")}
END = {
    "finish": inference_pb2.Finish(
        reason=generation_pb2.FINISH_REASON_LENGTH, usage=inference_pb2.Usage(output_tokens=2)
    )
}
WHOLE = _events(ACCEPTED, DONE, _delta(7), _delta(8), END)


async def _stream(events: Sequence[Event]) -> AsyncGenerator[Event, None]:
    """These, one after the other."""
    for event in events:
        yield event


async def _answer(events: Sequence[Event]) -> Answer:
    return await Reading().read(_stream(events))


async def test_an_answer_is_the_same_however_it_was_cut() -> None:
    """Pieces, workers, attempts, times and what was cached do not count; all else does."""
    once = {"delta": inference_pb2.Delta(text="<7><8>", token_ids=[7, 8])}
    cached = {"prefill_done": inference_pb2.PrefillDone(prompt_tokens=3, cached_tokens=2, prefill_worker="p")}
    assert await _answer(WHOLE) == await _answer(_events(ACCEPTED, cached, MIGRATED, once, END))
    assert await _answer(WHOLE) != await _answer(_events(ACCEPTED, DONE, _delta(7), _delta(9), END))


@pytest.mark.parametrize(
    "events",
    [
        _events(ACCEPTED, DONE, DONE, _delta(7), END),
        _events(ACCEPTED, _delta(7), END),
        _events(ACCEPTED, DONE, _delta(7)),
        _events(ACCEPTED, DONE, _delta(7), END, END),
        [*WHOLE[:2], *WHOLE[3:]],
    ],
    ids=["prompt twice", "no prompt", "no end", "two ends", "a gap"],
)
async def test_a_broken_stream_is_no_answer(events: list[Event]) -> None:
    """What is said twice, out of order or not at all is found, whatever the tokens are."""
    with pytest.raises(BrokenStreamError):
        await _answer(events)


async def test_a_recovery_lasts_from_the_last_word_before_the_loss() -> None:
    """To the first one after it, of the same candidate; two losses in a row are one recovery."""
    clock = ManualClock(0.0)
    reading = Reading(clock)

    async def slowly() -> AsyncIterator[Event]:
        """A second between two events."""
        parts = (ACCEPTED, DONE, _delta(7), MIGRATED, _delta(1, index=1), MIGRATED, _delta(8), END)
        for event in _events(*parts, {**END, "index": 1}):
            clock.advance(1.0)
            yield event

    await reading.read(slowly())
    assert reading.gaps_s == [4.0]
    assert reading.num_migrations == 2


class _Scripted:
    """A client whose every request ends alike."""

    def __init__(self, events: Sequence[Event], error: PacelineRpcError | None = None) -> None:
        self._events, self._error = events, error

    async def generate(self, prompt: object, **options: object) -> AsyncGenerator[Event, None]:
        """The events, and then the error."""
        for event in self._events:
            yield event
        # Others have their turn, as with a real server.
        await asyncio.sleep(0)
        if self._error is not None:
            raise self._error


def _error(reason: str) -> PacelineRpcError:
    error = PacelineRpcError(grpc.StatusCode.UNAVAILABLE, "sorry")
    error.reason, error.retry_after_s = reason, 0.0
    return error


CHANGED = _events(ACCEPTED, DONE, _delta(7), _delta(9), END)


@pytest.mark.parametrize(
    ("events", "error", "wrong", "lost", "refused"),
    [
        (WHOLE, None, False, False, False),
        (CHANGED, None, True, False, False),
        (WHOLE[:-1], None, True, False, False),
        (WHOLE[:3], _error("PEER_LOST"), False, True, False),
        (WHOLE[:1], _error("QUEUE_FULL"), False, False, True),
    ],
    ids=["right", "changed", "cut short", "lost", "refused"],
)
async def test_each_request_is_judged(
    events: list[Event], error: PacelineRpcError | None, *, wrong: bool, lost: bool, refused: bool
) -> None:
    """Changed or broken is wrong, an error is a loss, and who is told to come later is neither."""
    expected = Expected(ASKED, await _answer(WHOLE))
    load = Load(cast("PacelineClient", _Scripted(events, error)), [expected], seed=1)
    running = asyncio.create_task(load.run(1))
    while load.outcome.num_requests - load.outcome.num_left < 3:  # noqa: ASYNC110 - a count has no event
        await asyncio.sleep(0)
    load.stop()
    await running
    outcome = load.outcome
    assert [bool(outcome.wrong), bool(outcome.lost), outcome.num_refused > 0] == [wrong, lost, refused]


def test_requests_are_of_every_kind_and_the_same_for_a_seed() -> None:
    """Among a few are texts, several candidates, log probabilities of both kinds, and those that bypass the cache."""
    requests = make_requests(3, 150, 1000)
    assert requests == make_requests(3, 150, 1000) != make_requests(4, 150, 1000)
    assert {type(asked.prompt) for asked in requests} == {str, tuple}
    for option in ("n", "num_top_logprobs", "prompt_logprobs", "bypass_cache", "top_p"):
        assert any(asked.options.get(option) for asked in requests), option


async def test_a_stop_is_taken_from_the_answer() -> None:
    """So that it really ends it: a string out of the text, or one of the tokens."""
    candidate = replace((await _answer(WHOLE)).candidates[0], text="a long text to stop", token_ids=(1, 2, 3))
    stops = [with_stop(ASKED, candidate.text, candidate.token_ids, random.Random(seed)) for seed in range(20)]
    assert {key for asked in stops if asked for key in asked.options} == {
        "max_tokens",
        "stop",
        "stop_token_ids",
    }
    for asked in filter(None, stops):
        assert all(stop in candidate.text for stop in (asked.options.get("stop") or ())[1:])


# -- the relay


async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


async def test_a_relay_carries_holds_cuts_and_heals(tmp_path: Path) -> None:
    """Held bytes come later, a cut breaks what is open and what comes, and after healing all is as before."""
    target, path = tmp_path / "target.sock", tmp_path / "relay.sock"
    async with (
        await asyncio.start_unix_server(_echo, str(target)),
        asyncio.timeout(10),
        Relay(path, lambda: target) as relay,
    ):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"one")
        assert await reader.readexactly(3) == b"one"
        relay.hold()
        writer.write(b"two")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.readexactly(3), 0.05)
        relay.heal()
        assert await reader.readexactly(3) == b"two"
        relay.cut()
        assert await reader.read() == b""
        writer.close()
        reader, writer = await asyncio.open_unix_connection(str(path))
        assert await reader.read() == b""
        writer.close()
        relay.heal()
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"three")
        assert await reader.readexactly(5) == b"three"
        writer.close()
