"""A worker's prefix cache, lent over gRPC to whoever asks in the right words."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvtransfer.borrower import PrefixBorrower
from kvtransfer.chunks import LeaseState
from kvtransfer.lending import PrefixRequest
from kvtransfer.receiver import KVReceiver
from kvtransfer.transports.grpc import GrpcTransport
from paceline.core.errors import FingerprintMismatchError, InvariantError, KvLostError, PacelineError
from paceline.core.fingerprint import ModelFingerprint
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixOwner
from paceline.core.request import BootEpoch
from paceline.core.ticket import KvTicket
from paceline.engine.fake import FakeMemory
from paceline.engine.sequence import SequenceRole
from paceline.runtime.channels import Channels
from paceline.worker.events import EventQueue
from paceline.worker.worker import Worker
from tests.factories import BLOCK_SIZE, make_id, make_spec
from tests.worker.bench import DECODE, NUM_BLOCKS, PREFILL, require_empty, serving_worker, until

PROMPT = tuple(range(20, 40))  # 5 full blocks


@dataclass
class Loans:
    """A worker that has computed a prompt in the scope "mine", and memory to borrow into."""

    worker: Worker
    channels: Channels
    memory: FakeMemory

    def borrower(self, fingerprint: ModelFingerprint | None = None) -> PrefixBorrower:
        """Somebody who serves the same, or something else."""
        fingerprint = fingerprint or self.worker.loaded.fingerprint
        transport = GrpcTransport(self.channels, fingerprint)
        return PrefixBorrower(
            self.channels, KVReceiver(transport, self.memory, fingerprint), fingerprint, ask_timeout_s=20.0
        )

    def owner(self) -> PrefixOwner:
        """The worker, as a ticket of its names it."""
        return PrefixOwner(self.worker.key.worker_id, self.worker.address, self.worker.key.boot_epoch)

    async def ask(self, token_ids: tuple[int, ...] = PROMPT, cache_scope: str = "mine") -> KvTicket | None:
        """The answer to the question alone."""
        request = PrefixRequest(make_id("borrower", 3), cache_scope, token_ids)
        return await self.borrower()._ask(self.owner(), request)


@asynccontextmanager
async def _loans(directory: Path, *, role: int = PREFILL, lease_ttl_s: float = 30.0) -> AsyncIterator[Loans]:
    channels = Channels()
    tier = PREFILL if role == PREFILL else DECODE
    async with serving_worker(directory, "owner", tier, lease_ttl_s=lease_ttl_s) as worker:
        await _compute(worker, PROMPT)
        yield Loans(worker, channels, FakeMemory(NUM_BLOCKS, BLOCK_SIZE))
        await channels.aclose()


@pytest.fixture
async def loans(tiny_tokenizer_dir: Path) -> AsyncIterator[Loans]:
    """A prefill worker's."""
    async with _loans(tiny_tokenizer_dir) as loans:
        yield loans


async def _compute(worker: Worker, prompt_ids: tuple[int, ...]) -> None:
    events = EventQueue()
    spec = make_spec(f"computed-{prompt_ids[0]}", prompt_ids, max_tokens=1, cache_scope="mine")
    worker.engine.submit(spec, SequenceRole.GENERATE, events.put)
    await anext(events)
    await anext(events)


@pytest.mark.parametrize("role", [PREFILL, DECODE])
async def test_both_tiers_lend_what_they_have_cached(tiny_tokenizer_dir: Path, role: int) -> None:
    """Under a lease like any other: the blocks are held, pulled with all checks, and free after the release."""
    async with _loans(tiny_tokenizer_dir, role=role) as loans:
        ticket = await loans.ask((*PROMPT, 1, 2, 3, 4))
        assert ticket is not None
        assert (ticket.num_blocks, len(ticket.block_hashes)) == (5, 5)
        assert loans.worker.leases.stats().num_active == 1
        request = PrefixRequest(make_id("borrower", 3), "mine", PROMPT)
        block_ids = [BlockId(number) for number in range(10, 15)]
        num_blocks = await loans.borrower().borrow(
            loans.owner(), request, ticket.block_hashes, block_ids, num_held=1
        )
        assert num_blocks == 5
        tokens = [
            int.from_bytes(loans.memory.read(block_id)[slot * 8 : slot * 8 + 4], "little")
            for block_id in block_ids
            for slot in range(BLOCK_SIZE)
        ]
        assert tokens == [0] * BLOCK_SIZE + list(PROMPT[BLOCK_SIZE:])
        loans.worker.leases.release([ticket.lease_id])
        await require_empty(loans.worker)


async def test_what_is_not_cached_gives_no_ticket(loans: Loans) -> None:
    """Other tokens, or another scope; nothing is held for it."""
    assert await loans.ask((1, *PROMPT[1:])) is None
    assert await loans.ask(cache_scope="other") is None
    assert await loans.ask(cache_scope="") is None
    assert loans.worker.leases.stats().num_granted == 0
    await require_empty(loans.worker)


async def test_a_lent_prefix_stays_until_the_lease_ends(loans: Loans) -> None:
    """Whatever is computed meanwhile evicts none of it; afterwards it is evicted like anything else."""
    ticket = await loans.ask()
    assert ticket is not None
    for number in range(6):
        await _compute(loans.worker, tuple(range(60 + number, 140 + number)))
    assert (await loans.ask()) is not None
    for lease in list(loans.worker.leases._leases):
        loans.worker.leases.release([lease])
    for number in range(6):
        await _compute(loans.worker, tuple(range(80 + number, 188 + number)))
    assert (await loans.ask()) is None
    await require_empty(loans.worker)


async def test_a_loan_that_nobody_ends_is_over_with_its_lease(tiny_tokenizer_dir: Path) -> None:
    """The references are given back by the clock."""
    async with _loans(tiny_tokenizer_dir, lease_ttl_s=0.0) as loans:
        assert (await loans.ask()) is not None
        loans.worker.leases.sweep()
        assert loans.worker.leases.stats().num_expired == 1
        await require_empty(loans.worker)


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [
        ((), InvariantError),
        (PROMPT[:7], InvariantError),
        ((1,) * (4 * NUM_BLOCKS + 4), InvariantError),
    ],
)
async def test_what_does_not_fill_blocks_is_refused(
    loans: Loans, token_ids: tuple[int, ...], error: type[PacelineError]
) -> None:
    """No tokens, a part of a block, or more than there could be."""
    with pytest.raises(error):
        await loans.ask(token_ids)
    await require_empty(loans.worker)


async def test_another_life_and_another_model_are_refused(loans: Loans) -> None:
    """As in a pull."""
    request = PrefixRequest(make_id("borrower"), "mine", PROMPT)
    other_life = loans.owner()._replace(boot_epoch=BootEpoch(loans.owner().boot_epoch ^ 1))
    with pytest.raises(KvLostError):
        await loans.borrower()._ask(other_life, request)
    other_model = loans.borrower(replace(loans.worker.loaded.fingerprint, weights="other"))
    with pytest.raises(FingerprintMismatchError):
        await other_model._ask(loans.owner(), request)
    assert loans.worker.leases.stats().num_granted == 0


async def test_blocks_that_were_not_asked_for_are_given_back_unread(loans: Loans) -> None:
    """A ticket whose hashes are not those of the blocks that are wanted writes nothing."""
    ticket = await loans.ask()
    assert ticket is not None
    loans.worker.leases.release([ticket.lease_id])
    request = PrefixRequest(make_id("borrower"), "mine", PROMPT)
    block_ids = [BlockId(number) for number in range(5)]
    for hashes in ((ticket.block_hashes[1], *ticket.block_hashes[1:]), ticket.block_hashes[:4]):
        with pytest.raises(KvLostError):
            await loans.borrower().borrow(loans.owner(), request, hashes, block_ids, num_held=0)
    held = await loans.borrower().borrow(loans.owner(), request, ticket.block_hashes, block_ids, num_held=5)
    assert held == 5
    assert not any(bytes(loans.memory.read(block_id)).strip(b"\0") for block_id in block_ids)
    await require_empty(loans.worker)


async def test_a_loan_whose_room_is_needed_ends_at_once(loans: Loans) -> None:
    """The lease is over, its reader hears EXPIRED, and whoever needed the room has it."""
    ticket = await loans.ask()
    assert ticket is not None
    await _compute(loans.worker, tuple(range(60, 60 + 4 * NUM_BLOCKS - 4)))
    assert loans.worker.leases.release([ticket.lease_id]) == [LeaseState.EXPIRED]
    assert loans.worker.leases.stats().num_released == 1
    await require_empty(loans.worker)


async def test_a_loan_that_is_called_in_before_its_ticket_is_made_ends_too(loans: Loans) -> None:
    """The engine may be some steps ahead of the loop: whoever needs the room does not wait for the lease's clock."""
    engine = loans.worker.engine
    asking = asyncio.create_task(loans.ask())
    await until(lambda: engine.num_sequences == 1)
    # Needs all blocks but three.
    large = make_spec("large", tuple(range(60, 60 + 4 * NUM_BLOCKS - 12)), max_tokens=1)
    events = EventQueue()
    engine.submit(large, SequenceRole.GENERATE, events.put)
    time.sleep(0.2)  # noqa: ASYNC251 - the loop is busy with something else meanwhile
    await asking
    async with asyncio.timeout(5.0):
        await anext(events)
    assert loans.worker.leases.stats().num_active == 0
    await require_empty(loans.worker)
