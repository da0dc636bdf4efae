"""Lending: what is cached is held for a reader, who gets it at once or hears that there is nothing."""

from collections.abc import Sequence

import pytest

from paceline.core.block_hash import BlockHash
from paceline.core.errors import KvLostError
from paceline.core.kv_layout import KVGroup, View
from paceline.core.request import SequenceId
from paceline.engine.events import BlocksReady, Failed, Started
from paceline.engine.sequence import SequenceRole
from tests.engine.harness import Bench, HashBlock, oracle
from tests.factories import BLOCK_SIZE, make_id, make_spec

PROMPT = tuple(range(20, 40))  # 5 full blocks


def _computed(prompt_ids: tuple[int, ...] = PROMPT, num_blocks: int = 8, **options: object) -> Bench:
    """A pool in which a prompt was computed, and is cached."""
    bench = Bench(num_blocks, **options)  # type: ignore[arg-type] # each has its field's type
    bench.add(make_spec("computed", prompt_ids, max_tokens=2))
    bench.run()
    return bench


def _lend(
    bench: Bench, token_ids: tuple[int, ...] = PROMPT, *, name: str = "loan", cache_scope: str = ""
) -> SequenceId:
    loan = bench.add(make_spec(name, token_ids, max_tokens=1, cache_scope=cache_scope), SequenceRole.LEND)
    bench.scheduler.check_invariants()
    assert bench.scheduler.has_work(), "there is something to say"
    bench.step()
    return loan


def _num_lent(bench: Bench, loan: SequenceId) -> int:
    """Blocks that were lent; what was said of them is checked."""
    if bench.of(loan, Failed):
        assert isinstance(bench.end(loan), KvLostError)
        assert bench.events[loan] == bench.of(loan, Failed)
        return 0
    started, ready = bench.one(loan, Started), bench.one(loan, BlocksReady)
    assert bench.events[loan] == [started, ready]
    assert started.num_blocks == len(started.block_hashes) == len(ready.blocks)
    for block in ready.blocks:
        assert block.checksum == bench.runner.memory.checksum(block.block_id)
    return started.num_blocks


def test_what_is_cached_is_lent_at_once() -> None:
    """The next step names all blocks, with their checksums; nothing is computed for it."""
    bench = _computed()
    loan = _lend(bench)
    assert _num_lent(bench, loan) == 5
    assert not bench.outputs[-1].scheduled
    assert not bench.scheduler.has_work()
    assert bench.pool.num_available == 3
    bench.release(loan)
    assert bench.pool.num_available == 8


def test_as_much_is_lent_as_is_cached() -> None:
    """The longest beginning: the same tokens up to somewhere, or fewer tokens."""
    bench = _computed()
    for number, (token_ids, num_blocks) in enumerate(
        [((*PROMPT[:12], 1, 2, 3, 4), 3), (PROMPT[:8], 2), ((*PROMPT, *range(4)), 5), ((1, *PROMPT[1:]), 0)]
    ):
        loan = _lend(bench, token_ids, name=f"loan-{number}")
        assert _num_lent(bench, loan) == num_blocks
        bench.release(loan)
    assert bench.pool.num_available == 8


def test_what_is_lent_is_not_evicted_and_can_be_afterwards() -> None:
    """Whoever needs the room waits for the end of the loan."""
    bench = _computed()
    loan = _lend(bench)
    ready = bench.one(loan, BlocksReady)
    large = bench.add(make_spec("large", tuple(range(60, 80)), max_tokens=3))
    bench.steps(3)
    assert bench.tokens(large) == []
    assert all(block.checksum == bench.runner.memory.checksum(block.block_id) for block in ready.blocks)
    bench.release(loan)
    bench.run()
    assert bench.tokens(large) == oracle(make_spec("large", tuple(range(60, 80)), max_tokens=3))[0]
    assert bench.pool.stats().num_evictions > 0
    assert _num_lent(bench, _lend(bench, name="again")) < 5


def test_a_loan_leaves_those_that_run_what_they_grow_by() -> None:
    """A block that a running sequence will ask for is not lent away, so that no loan preempts."""
    bench = _computed(PROMPT[:8])
    running = bench.add(make_spec("running", (1, 2, 3), max_tokens=28))
    while bench.pool.num_available > 2:
        bench.step()
    loan = _lend(bench, PROMPT[:8])
    assert _num_lent(bench, loan) == 0
    bench.run()
    assert bench.scheduler.stats().num_preemptions == 0
    assert bench.tokens(running) == oracle(make_spec("running", (1, 2, 3), max_tokens=28))[0]


def test_another_scope_gets_nothing() -> None:
    """Cached blocks are lent within their cache scope only."""
    bench = Bench(16)
    bench.add(make_spec("computed", PROMPT, max_tokens=2, cache_scope="mine"))
    bench.run()
    assert _num_lent(bench, _lend(bench, name="none")) == 0
    assert _num_lent(bench, _lend(bench, name="other", cache_scope="other")) == 0
    assert _num_lent(bench, _lend(bench, name="same", cache_scope="mine")) == 5


def _always_the_same(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    return BlockHash(bytes([parent[0] + 1 & 0xFF if len(parent) == 1 else 0]))


def test_a_colliding_hash_gets_nothing() -> None:
    """The tokens are compared: other tokens under the same hashes are not lent."""
    hash_block: HashBlock = _always_the_same
    bench = _computed(hash_block=hash_block)
    assert _num_lent(bench, _lend(bench, tuple(range(60, 80)))) == 0
    assert bench.pool.stats().num_collisions == 1
    assert _num_lent(bench, _lend(bench, name="same")) == 5


def test_a_loan_that_is_released_before_the_step_says_nothing() -> None:
    """Its blocks are free at once; of one that found nothing there is nothing to release."""
    bench = _computed()
    for name, token_ids in (("hit", PROMPT), ("miss", (9,) * 4)):
        loan = bench.add(make_spec(name, token_ids, max_tokens=1), SequenceRole.LEND)
        bench.release(loan)
        assert bench.pool.num_available == 8
        bench.step()
        assert not bench.of(loan, Started)
    assert not bench.scheduler.has_work()


def test_a_model_with_windows_lends_nothing() -> None:
    """Which blocks a reader needs depends on what it has computed itself."""
    bench = _computed(num_blocks=32, groups=(KVGroup(View(6)), KVGroup()))
    assert _num_lent(bench, _lend(bench)) == 0
    assert bench.pool.num_available == 32


@pytest.mark.parametrize("num_loans", [2, 3])
def test_one_prefix_can_be_lent_several_times(num_loans: int) -> None:
    """Each loan holds the blocks; they are free after the last one."""
    bench = _computed()
    loans = [_lend(bench, name=f"loan-{number}") for number in range(num_loans)]
    assert [_num_lent(bench, loan) for loan in loans] == [5] * num_loans
    for loan in loans:
        assert bench.pool.num_available == 3
        bench.release(loan)
    assert bench.pool.num_available == 8


def test_a_loan_is_not_charged_to_a_tenant() -> None:
    """It neither counts as service nor makes a tenant known."""
    bench = _computed()
    before = bench.scheduler.accounts.services()
    bench.scheduler.add(
        make_spec("loan", PROMPT[: 4 * BLOCK_SIZE], max_tokens=1, tenant="x"), SequenceRole.LEND
    )
    assert bench.scheduler.accounts.services() == before
    bench.release(make_id("loan"))
    assert bench.scheduler.accounts.services() == before


def test_a_loan_is_called_in_when_somebody_needs_the_room() -> None:
    """Once; the blocks are held until whoever holds the lease has ended it, and then they are the other one's."""
    bench = _computed()
    loan = _lend(bench)
    large = bench.add(make_spec("large", tuple(range(60, 80)), max_tokens=3))
    bench.steps(3)
    assert len(bench.of(loan, Failed)) == 1
    assert bench.of(large, Started) == []
    bench.release(loan)
    bench.run()
    assert bench.tokens(large) == oracle(make_spec("large", tuple(range(60, 80)), max_tokens=3))[0]


def test_a_loan_is_called_in_when_somebody_had_to_be_preempted() -> None:
    """What grows takes from those that run in this step; in the next ones the loan's room is there too."""
    bench = _computed(num_blocks=9, watermark=0.0, watermark_rise=0.0)
    loan = _lend(bench)
    for name in ("a", "b"):
        bench.add(make_spec(name, (len(name),) * 3, max_tokens=20))
    while bench.scheduler.stats().num_preemptions == 0:
        assert bench.of(loan, Failed) == []
        bench.step()
    bench.step()
    assert len(bench.of(loan, Failed)) == 1


def test_nothing_is_lent_while_somebody_waits_for_room() -> None:
    """A loan would take what the other one waits for."""
    bench = _computed()
    bench.add(make_spec("large", tuple(range(60, 76)), max_tokens=3), SequenceRole.PREFILL_ONLY)
    bench.run()
    assert bench.pool.num_available == 4
    bench.add(make_spec("waits", tuple(range(80, 100)), max_tokens=3))
    bench.step()
    loan = _lend(bench, PROMPT[:8], name="refused")
    assert _num_lent(bench, loan) == 0


def test_nothing_is_lent_as_long_as_somebody_waits_for_room() -> None:
    """Also in the steps in which the one who waits is not tried again, since nothing has come free."""
    bench = _computed(num_blocks=24, watermark=0.0, watermark_rise=0.0)
    bench.add(make_spec("running", (1, 2, 3), max_tokens=28))
    bench.add(make_spec("large", tuple(range(60, 84)), max_tokens=3), SequenceRole.PREFILL_ONLY)
    bench.steps(4)
    waits = bench.add(make_spec("waits", tuple(range(80, 152)), max_tokens=3))
    for number in range(8):
        bench.step()
        loan = _lend(bench, PROMPT[:8], name=f"refused-{number}")
        assert bench.of(waits, Started) == []
        assert _num_lent(bench, loan) == 0, number


def test_loans_that_follow_each_other_keep_nobody_waiting() -> None:
    """Whoever needs their room has it once those loans are over that were granted before it came."""
    bench = _computed(num_blocks=24, watermark=0.0, watermark_rise=0.0)
    bench.add(make_spec("running", (1, 2, 3), max_tokens=28))
    bench.add(make_spec("large", tuple(range(60, 84)), max_tokens=3), SequenceRole.PREFILL_ONLY)
    bench.steps(2)
    loans = [_lend(bench)]
    waits = bench.add(make_spec("waits", tuple(range(80, 136)), max_tokens=3))
    bench.step()
    while not bench.of(waits, Started) and len(loans) < 200:
        # A reader needs three steps to pull, or to hear EXPIRED, and every step somebody else asks.
        loans.append(bench.add(make_spec(f"loan-{len(loans)}", PROMPT, max_tokens=1), SequenceRole.LEND))
        bench.step()
        for over in loans[:-3]:
            bench.release(over)
        if bench.end(make_id("running")) is not None:
            break
    assert len(loans) < 8, f"still waiting after {len(loans)} loans"
