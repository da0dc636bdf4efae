"""A hand-over that fails while an engine still writes: the router hears at once, the blocks wait."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvtransfer.borrower import PrefixBorrower
from kvtransfer.receiver import HandOverTimes, KVReceiver
from kvtransfer.transports.late import LateTransport
from tests.decode_service.pair import SPEC, Pair, kinds_of, token_ids_of
from tests.factories import make_spec
from tests.worker.bench import NUM_BLOCKS, output_of, until
from tests.worker.test_recalls import _hand_over, _require_outputs
from tests.worker.test_recalls import pair as narrow_pair

__all__ = ["narrow_pair"]

NUM_SPEC_BLOCKS = 5


class Engine:
    """An engine that writes in place, and waits at a gate before each block."""

    def __init__(self, pair: Pair, times: HandOverTimes | None = None) -> None:
        fingerprint, memory = pair.decode.loaded.fingerprint, pair.decode.loaded.runner.memory
        self.gate = asyncio.Event()
        self.num_begun = 0
        transport = LateTransport(
            pair.prefill.sender, fingerprint, pair.prefill.loaded.runner.memory, memory, sleep=self._wait
        )
        self.receiver = KVReceiver(transport, memory, fingerprint, times)
        self.borrower = PrefixBorrower(pair.channels, self.receiver, fingerprint)

    async def until_writing(self) -> None:
        """Returns when it stands at the gate."""
        await until(lambda: self.num_begun > 0)

    async def _wait(self, _: float) -> None:
        self.num_begun += 1
        await self.gate.wait()


@pytest.fixture
async def engine(pair: Pair) -> AsyncIterator[Engine]:
    """What the decode worker receives by; its gate is closed, and open in the end."""
    engine = Engine(pair, HandOverTimes(stall_timeout_s=0.05, max_stalls=1))
    pair.decode.receiver = engine.receiver
    yield engine
    engine.gate.set()


async def test_an_engine_that_writes_in_place_hands_over_like_any_other(pair: Pair, engine: Engine) -> None:
    """With its gate open the tokens are the oracle's."""
    engine.gate.set()
    pair.submit(SPEC, await pair.ticket())
    (events,) = (await pair.until_end(SPEC)).values()
    assert kinds_of(events) == ["kv_received", *["tokens"] * 7]
    assert token_ids_of(events) == output_of(SPEC)[1:]
    await pair.require_empty()


async def test_a_failure_is_told_at_once_and_the_blocks_come_back_later(pair: Pair, engine: Engine) -> None:
    """The engine hangs: KV_LOST; a request that needs its blocks waits until it has written its last byte."""
    pair.submit(SPEC, await pair.ticket())
    (events,) = (await pair.until_end(SPEC)).values()
    assert kinds_of(events) == ["failed"]
    assert events[0].failed.reason == "KV_LOST"
    assert pair.prefill.leases.stats().num_active == 0
    large = make_spec("large", tuple(range(4 * (NUM_BLOCKS - NUM_SPEC_BLOCKS) + 1)), max_tokens=3)
    small = make_spec("small", (1, 2, 3), max_tokens=3)
    pair.submit(large)
    pair.submit(small)
    await pair.until_end(small)
    assert pair.decode.engine.stats.num_running == 0
    assert pair.decode.engine.stats.num_free_blocks == NUM_BLOCKS - NUM_SPEC_BLOCKS
    engine.gate.set()
    (events,) = (await pair.until_end(large)).values()
    assert token_ids_of(events) == output_of(large)
    await pair.require_empty()


@pytest.mark.parametrize("how", ["cancel", "twice", "stream"])
async def test_what_is_given_up_waits_too(pair: Pair, engine: Engine, how: str) -> None:
    """A cancel, another one after it, and the end of the stream free nothing that is written to."""
    engine.receiver._times = HandOverTimes()
    pair.submit(SPEC, await pair.ticket())
    await engine.until_writing()
    if how == "stream":
        await pair.session.aclose()
    else:
        pair.cancel(SPEC)
        await until(lambda: SPEC.sequence_id in pair.session._quarantine)
    if how == "twice":
        pair.cancel(SPEC)
    small = make_spec("small", (1, 2, 3), max_tokens=3)
    pair.submit(small)
    await pair.until_end(small)
    assert pair.decode.engine.stats.num_free_blocks == NUM_BLOCKS - NUM_SPEC_BLOCKS
    assert not pair.decode.is_idle
    engine.gate.set()
    await pair.require_empty()
    assert SPEC.sequence_id not in pair.session._quarantine


async def test_a_recall_goes_on_only_when_nothing_writes_any_more(narrow_pair: Pair) -> None:
    """A loan that stalls is a miss, and what is missing is computed into the same blocks: not before they are settled."""
    pair = narrow_pair
    await _hand_over(pair)
    engine = Engine(pair, HandOverTimes(stall_timeout_s=0.05, max_stalls=1))
    pair.decode.borrower = engine.borrower
    pair.decode_gate.open()
    await engine.until_writing()
    await until(lambda: pair.prefill.leases.stats().num_released == 2)
    for _ in range(20):
        await asyncio.sleep(0)
    assert pair.session._recalls._pulls, "the loan is over, and its blocks are not"
    engine.gate.set()
    await _require_outputs(pair, num_recalled=0)
    await pair.require_empty()
