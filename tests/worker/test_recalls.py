"""A decode worker under pressure pulls a prompt again from the worker that computed it, and computes it if that fails."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvtransfer.borrower import PrefixBorrower
from kvtransfer.receiver import HandOverTimes, KVReceiver
from kvtransfer.transports.faulty import Fault, FaultKind, FaultyTransport
from kvtransfer.transports.grpc import GrpcTransport
from paceline.core.prefix import PrefixOwner
from paceline.core.request import BootEpoch, SamplingParams, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.scheduler import Scheduler
from tests.decode_service.pair import Pair, kinds_of, open_pair, token_ids_of
from tests.factories import make_spec
from tests.worker.bench import output_of, require_empty, until

NUM_DECODE_BLOCKS = 12
# Five full blocks and a half; nine by the end of the output.
MOVED = make_spec("moved", tuple(range(20, 42)), max_tokens=14, ignore_eos=True)
# Takes the decode worker's whole pool in the end, and with it what is cached.
OLD = make_spec("old", (1, 2, 3), max_tokens=45, ignore_eos=True)
NUM_HANDED_OVER = 6


@pytest.fixture
async def pair(tiny_tokenizer_dir: Path) -> AsyncIterator[Pair]:
    """A decode worker that does not hold both."""
    async with open_pair(tiny_tokenizer_dir, num_decode_blocks=NUM_DECODE_BLOCKS) as pair:
        # What can be pulled again is the cheapest to take.
        _scheduler(pair).costs.remote_pull_s = 0.0
        yield pair


def _scheduler(pair: Pair) -> Scheduler:
    return pair.decode.engine._engine._scheduler


async def _hand_over(pair: Pair, spec: SequenceSpec = MOVED) -> KvTicket:
    """Both are on the decode worker, which stands still in the middle of a step."""
    ticket = await pair.ticket(spec)
    pair.decode_gate.close()
    pair.submit(OLD)
    await pair.decode_gate.until_arrived()
    pair.submit(spec, ticket)
    await until(lambda: spec.sequence_id in pair.session._reservations)
    for _ in range(2):
        pair.decode_gate.let_one_pass()
        await pair.decode_gate.until_arrived()
    await until(lambda: pair.decode.num_blocks_pulled == NUM_HANDED_OVER)
    return ticket


async def _evict(pair: Pair, num_blocks: int) -> None:
    """The prefill worker computes a prompt of so many blocks."""
    filler = make_spec("filler", (7,) * (4 * num_blocks - 1), max_tokens=1, bypass_cache=True)
    ticket = await pair.ticket(filler)
    pair.prefill.leases.release([ticket.lease_id])


async def _require_outputs(pair: Pair, *, num_recalled: int) -> None:
    """Both come to their ends, with the tokens of the oracle, and nothing but tokens is said."""
    events = await pair.until_end(OLD, MOVED)
    moved = events[MOVED.sequence_id]
    assert kinds_of(moved) == ["kv_received", *["tokens"] * 13]
    assert token_ids_of(moved) == output_of(MOVED)[1:]
    assert token_ids_of(events[OLD.sequence_id]) == output_of(OLD)
    assert moved[-1].tokens.num_preemptions == 1
    assert _scheduler(pair).stats().preemptions == {"recompute": 0, "swap": 0, "remote": 1}
    assert pair.decode.num_blocks_pulled - NUM_HANDED_OVER == num_recalled


async def test_a_preempted_prompt_is_pulled_again(pair: Pair) -> None:
    """Under a new lease, which is given back; only what follows the prompt's full blocks is computed."""
    await _hand_over(pair)
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=5)
    stats = pair.prefill.leases.stats()
    assert (stats.num_granted, stats.num_released) == (2, 2)
    assert _scheduler(pair).costs.remote_hit_share > 0.5
    await pair.require_empty()


@pytest.mark.parametrize(("num_evicting", "num_recalled"), [(29, 3), (31, 1), (32, 0)])
async def test_what_the_owner_has_evicted_is_computed(
    pair: Pair, num_evicting: int, num_recalled: int
) -> None:
    """As much comes as it still has, which may be nothing; the tokens are the same."""
    await _hand_over(pair)
    await _evict(pair, num_evicting)
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=num_recalled)
    await pair.require_empty()


async def test_an_owner_that_is_gone_is_a_miss(pair: Pair) -> None:
    """Nobody listens any more: the prompt is computed, and the client hears of nothing."""
    await _hand_over(pair)
    await pair.stop_prefill()
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=0)
    assert _scheduler(pair).costs.remote_hit_share < 0.5
    await require_empty(pair.decode)


async def test_an_owner_in_another_life_is_a_miss(pair: Pair) -> None:
    """A restarted worker is asked under the boot epoch of the ticket, and lends nothing."""
    await _hand_over(pair)
    key = pair.prefill.key
    pair.prefill.key = key._replace(boot_epoch=BootEpoch(key.boot_epoch ^ 1))
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=0)
    await pair.require_empty()


async def test_an_owner_that_drains_still_lends(pair: Pair) -> None:
    """It takes nothing new, and a loan is nothing new to compute."""
    await _hand_over(pair)
    pair.prefill.draining.set()
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=5)
    await pair.require_empty()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.CORRUPT, 2),
        Fault(FaultKind.BREAK, 3),
        Fault(FaultKind.CUT, 1),
        Fault(FaultKind.DROP, 0),
        Fault(FaultKind.REORDER, 1),
        Fault(FaultKind.STALL, 2),
        Fault(FaultKind.LOSE_RELEASE_ANSWER),
    ],
    ids=lambda fault: fault.kind.name,
)
async def test_a_loan_that_fails_on_the_way_is_a_miss(pair: Pair, fault: Fault) -> None:
    """Damaged, broken off, silent, or not confirmed: nothing of it is used, and the lease is over."""
    fingerprint = pair.decode.loaded.fingerprint
    transport = FaultyTransport(GrpcTransport(pair.channels, fingerprint), [fault])
    times = HandOverTimes(stall_timeout_s=0.05, max_stalls=1)
    receiver = KVReceiver(transport, pair.decode.loaded.runner.memory, fingerprint, times)
    pair.decode.borrower = PrefixBorrower(pair.channels, receiver, fingerprint)
    await _hand_over(pair)
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=0)
    assert pair.prefill.leases.stats().num_granted == 2
    await pair.require_empty()


# -- an owner that does not answer at once


@asynccontextmanager
async def _busy_owner(pair: Pair) -> AsyncIterator[None]:
    """The prefill worker is in the middle of a step, which ends in the end; the decode worker goes on."""
    pair.prefill_gate.close()
    busy = asyncio.create_task(pair.ticket(make_spec("busy", (5, 6, 7))))
    await pair.prefill_gate.until_arrived()
    pair.decode_gate.open()
    yield
    pair.prefill_gate.open()
    pair.prefill.leases.release([(await busy).lease_id])


@pytest.mark.parametrize("how", ["sequence", "candidate", "stream"])
async def test_a_cancel_while_the_owner_is_asked_leaves_nothing(pair: Pair, how: str) -> None:
    """The decode worker is free at once; the lease that is granted afterwards is given back."""
    pair.decode.borrower._ask_timeout_s = 600.0
    await _hand_over(pair)
    async with _busy_owner(pair):
        # The prompt that keeps it busy, and the loan.
        await until(lambda: pair.prefill.engine.num_sequences == 2)
        if how == "stream":
            await pair.session.aclose()
        else:
            pair.cancel(MOVED, 0 if how == "candidate" else None)
        await until(lambda: pair.session._recalls.is_empty and pair.decode.engine.num_sequences == 0)
        await require_empty(pair.decode)
    await until(lambda: pair.prefill.leases.stats().num_granted == 3)
    await pair.require_empty()


async def test_a_cancel_before_the_owner_is_asked_leaves_nothing(pair: Pair) -> None:
    """The engine has said what it wants, and nobody has begun to fetch it: the blocks are free all the same."""
    await _hand_over(pair)
    pair.decode_gate.open()
    await until(lambda: bool(pair.session._recalls._pulls))
    pair.cancel(MOVED)
    await pair.require_empty()


async def test_an_owner_that_does_not_answer_in_time_is_a_miss(pair: Pair) -> None:
    """The prompt is computed here; the owner finds out that nobody waits, and grants nothing that lasts."""
    pair.decode.borrower._ask_timeout_s = 0.05
    await _hand_over(pair)
    async with _busy_owner(pair):
        await _require_outputs(pair, num_recalled=0)
    await pair.require_empty()


async def test_a_recall_lasts_no_longer_than_its_caller_waits(pair: Pair) -> None:
    """At the caller's deadline it is a miss, however long the owner may take; the engine says what becomes of the sequence."""
    pair.decode.borrower._ask_timeout_s = 600.0
    ticket = await _hand_over(pair)
    owner = PrefixOwner(ticket.owner_id, ticket.owner_address, ticket.boot_epoch)
    pair.session._recalls.remember(MOVED, owner, asyncio.get_running_loop().time())
    async with _busy_owner(pair):
        await _require_outputs(pair, num_recalled=0)
    await pair.require_empty()


async def test_where_a_prompt_came_from_is_known_until_its_sequence_ends(pair: Pair) -> None:
    """With its deadline; of what was computed here nothing is remembered."""
    now_s = asyncio.get_running_loop().time()
    spec = make_spec("moved", MOVED.prompt_ids, max_tokens=14, ignore_eos=True, time_budget_s=1000.0)
    ticket = await _hand_over(pair, spec)
    ((sequence_id, origin),) = pair.session._recalls._origins.items()
    assert sequence_id == spec.sequence_id
    assert (origin.owner.worker_id, origin.owner.address) == (ticket.owner_id, pair.prefill.address)
    assert origin.owner.boot_epoch == ticket.boot_epoch
    assert origin.deadline_s is not None
    assert now_s + 1000.0 <= origin.deadline_s <= asyncio.get_running_loop().time() + 1000.0
    pair.decode_gate.open()
    await _require_outputs(pair, num_recalled=5)
    assert pair.session._recalls.is_empty


async def test_a_session_that_waits_for_blocks_of_a_loan_can_be_closed(pair: Pair) -> None:
    """The receiver is writing when the stream breaks: it stops first, then the blocks are free, on both sides."""
    fingerprint = pair.decode.loaded.fingerprint
    transport = FaultyTransport(GrpcTransport(pair.channels, fingerprint), [Fault(FaultKind.STALL, 2)])
    receiver = KVReceiver(transport, pair.decode.loaded.runner.memory, fingerprint)
    pair.decode.borrower = PrefixBorrower(pair.channels, receiver, fingerprint)
    await _hand_over(pair)
    pair.decode_gate.open()
    await until(lambda: pair.prefill.leases.stats().num_granted == 2)
    pair.cancel(MOVED)
    await pair.require_empty()
    assert pair.prefill.leases.stats().num_released == 2


@pytest.mark.parametrize("cancelled", [0, 1, None])
async def test_one_candidate_is_recalled_and_cancelled_for_itself(
    tiny_tokenizer_dir: Path, cancelled: int | None
) -> None:
    """While the last one of two is recalled, it or the other one is cancelled, or both: who is left has its own tokens."""
    spec = make_spec(
        "moved",
        MOVED.prompt_ids,
        max_tokens=14,
        ignore_eos=True,
        sampling=SamplingParams(seed=3),
        candidates=(0, 1),
    )
    async with open_pair(tiny_tokenizer_dir, num_decode_blocks=NUM_DECODE_BLOCKS, victim="lifo") as pair:
        pair.decode.borrower._ask_timeout_s = 600.0
        await _hand_over(pair, spec)
        async with _busy_owner(pair):
            await until(lambda: pair.prefill.engine.num_sequences == 2)
            assert list(pair.session._recalls._pulls) == [(spec.sequence_id, 1)]
            pair.cancel(spec, cancelled)
        tokens: dict[int, tuple[int, ...]] = {0: (), 1: ()}
        left = {0, 1} - {cancelled} if cancelled is not None else set()
        async with asyncio.timeout(20):
            while any(len(tokens[candidate]) < spec.max_tokens - 1 for candidate in left):
                for event in await pair.session.take_events():
                    if event.request_id == "moved":
                        tokens[event.tokens.candidate] += tuple(event.tokens.token_ids)
        for candidate in left:
            assert tokens[candidate] == output_of(spec, candidate)[1:]
        await pair.require_empty()
