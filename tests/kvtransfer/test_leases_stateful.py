"""Random histories of a lease table against a simple model of it."""

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvtransfer.chunks import LeaseState
from kvtransfer.leases import LeaseTable
from paceline.core.clock import ManualClock
from paceline.core.kv_layout import BlockId
from paceline.core.request import FirstToken, LeaseId, RequestId, SequenceId
from paceline.core.ticket import ReadyBlock
from tests.kvtransfer.hand_over import FIRST_TOKENS, block_hashes

TTL_S = 30


@dataclass(slots=True)
class Model:
    """What we believe of one lease. `expires_at_s` is None while it is open."""

    sequence_id: SequenceId
    num_blocks: int
    num_ready: int = 0
    expires_at_s: float | None = None
    is_over: bool = False

    def holds(self, now_s: float) -> bool:
        """Whether a reader may rely on it."""
        return not self.is_over and (self.expires_at_s is None or now_s < self.expires_at_s)


class LeaseMachine(RuleBasedStateMachine):
    """Every operation on leases that are open, complete, over, or were never granted, in any order."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.ended: list[SequenceId] = []
        self.table = LeaseTable(self.ended.append, ttl_s=TTL_S, clock=self.clock)
        self.models: dict[LeaseId, Model] = {}

    @rule(target=leases, num_blocks=st.integers(1, 4))
    def grant(self, num_blocks: int) -> LeaseId:
        """A new prefill begins."""
        sequence_id = SequenceId(RequestId("r"), len(self.models))
        lease = self.table.grant(sequence_id, num_blocks, block_hashes(num_blocks - 1))
        self.models[lease.lease_id] = Model(sequence_id, num_blocks)
        return lease.lease_id

    @rule(lease_id=leases)
    def progress(self, lease_id: LeaseId) -> None:
        """One more block is ready, if the prefill is still under way as far as it knows."""
        model = self.models[lease_id]
        if model.expires_at_s is None and model.num_ready < model.num_blocks:
            held = model.holds(self.clock())
            assert self.table.progress(lease_id, [ReadyBlock(BlockId(model.num_ready), 0)]) == held
            model.num_ready += held

    @rule(lease_id=leases, first_tokens=st.sampled_from([FIRST_TOKENS, ()]))
    def complete(self, lease_id: LeaseId, first_tokens: tuple[FirstToken, ...]) -> None:
        """The prefill has its result, or there was none to do."""
        model = self.models[lease_id]
        if model.expires_at_s is None and model.num_ready == model.num_blocks:
            assert self.table.complete(lease_id, first_tokens) == model.holds(self.clock())
            model.expires_at_s = self.clock() + TTL_S

    @rule(lease_id=leases)
    def drop(self, lease_id: LeaseId) -> None:
        """The Prefill stream closes."""
        self.table.drop(lease_id)
        model = self.models[lease_id]
        model.is_over = model.is_over or model.expires_at_s is None

    @rule(lease_id=leases)
    def renew(self, lease_id: LeaseId) -> None:
        """A receiver keeps its lease alive."""
        model = self.models[lease_id]
        held = model.holds(self.clock())
        assert self.table.renew([lease_id]) == [_state(held=held)]
        if held and model.expires_at_s is not None:
            model.expires_at_s = self.clock() + TTL_S

    @rule(lease_id=leases)
    def release(self, lease_id: LeaseId) -> None:
        """A receiver is done, or gives up."""
        model = self.models[lease_id]
        assert self.table.release([lease_id]) == [_state(held=model.holds(self.clock()))]
        model.is_over = True

    @rule()
    def release_unknown(self) -> None:
        """Somebody is confused."""
        assert self.table.release([LeaseId("unknown")]) == [LeaseState.EXPIRED]

    @rule(duration_s=st.sampled_from([1, 10, 29, 30]))
    def advance(self, duration_s: int) -> None:
        """Time goes by."""
        self.clock.advance(duration_s)

    @rule()
    def sweep(self) -> None:
        """The timer fires; after it exactly the leases that hold are left."""
        self.table.sweep()
        num_held = sum(model.holds(self.clock()) for model in self.models.values())
        assert self.table.stats().num_active == num_held

    @invariant()
    def each_lease_ends_once(self) -> None:
        """`on_end` is called once for each lease that is over, and for no other."""
        self.table.check_invariants()
        assert len(set(self.ended)) == len(self.ended)
        assert len(self.ended) == len(self.models) - self.table.stats().num_active
        held = {model.sequence_id for model in self.models.values() if model.holds(self.clock())}
        assert not held & set(self.ended)


def _state(*, held: bool) -> LeaseState:
    return LeaseState.VALID if held else LeaseState.EXPIRED


TestLeaseTable = LeaseMachine.TestCase
TestLeaseTable.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
