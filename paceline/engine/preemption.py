"""Takes blocks from running sequences when others cannot grow: from whom, and what becomes of their KV."""

from collections import Counter
from collections.abc import Sequence as AbstractSequence

from paceline.core.clock import Clock
from paceline.engine.block_pool import BlockPool
from paceline.engine.costs import CostEstimate, Loss, PreemptionKind
from paceline.engine.policies import VICTIM_POLICIES, Victim, choose_victims
from paceline.engine.running import Running
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence, SequenceRole, SequenceStatus
from paceline.engine.swap import SwapSpace


class Preemption:
    """Chooses victims and takes their blocks; the caller sends them back to wait."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        running: Running,
        swap: SwapSpace,
        costs: CostEstimate,
        clock: Clock,
    ) -> None:
        self._policy = VICTIM_POLICIES[config.victim]
        self._aging_s = config.aging_s
        self._pool = pool
        self._running = running
        self._swap = swap
        self.costs = costs
        self._clock = clock
        self.num_rounds = 0
        # Where there are windows, a prefix of the owner's is not what is needed here.
        self._recalls = config.prefix_pull != "never" and pool.is_whole
        self._always_recalls = config.prefix_pull == "always"
        self.counts = Counter[PreemptionKind]()

    def make_room(self, growing: AbstractSequence[Sequence]) -> list[Sequence]:
        """Whoever had to lose its blocks so that those of `growing` that are left can have their next one."""
        # A decode needs one block at most, and nearly always there are enough.
        if self._pool.is_whole and len(growing) <= self._pool.num_available:
            return []
        wanted = {sequence: sequence.blocks.num_missing(sequence.num_tokens) for sequence in growing}
        num_lacking = sum(wanted.values()) - self._pool.num_available
        if num_lacking <= 0:
            return []
        # The blocks of a PREFILL_ONLY sequence are promised to a receiver, and those of a parked one are being filled.
        victims = [
            self._victim(sequence, wanted.get(sequence, 0))
            for sequence in (*self._running.decoding, *self._running.prefilling)
            if sequence.role is not SequenceRole.PREFILL_ONLY
        ]
        chosen = [
            victim.sequence for victim in choose_victims(victims, num_lacking, self._policy, self._gain)
        ]
        self.num_rounds += 1
        for sequence in chosen:
            self._take_blocks(sequence)
        return chosen

    def _victim(self, sequence: Sequence, num_wanted: int) -> Victim:
        loss = self._loss(sequence)
        cost_s, _ = self._cheapest(sequence, loss)
        was_last = 0 < sequence.victim_of == self.num_rounds
        # Who has waited for long and came in by its age must get somewhere, whatever its class.
        is_aged = sequence.arrival_s <= self._clock() - self._aging_s
        urgency = 0 if is_aged else int(sequence.turn_class)
        return Victim(sequence, urgency, cost_s, loss.num_blocks, num_wanted, was_last)

    def _gain(self, victims: AbstractSequence[Victim]) -> int:
        """By how much the lack of blocks shrinks without these; blocks that only they hold come free with the last of them."""
        tables = [table for victim in victims for table in victim.sequence.blocks.tables]
        held = (block_id for table in tables if not table.is_windowed for block_id in table.held_ids)
        num_pledged = sum(table.pledged for table in tables)
        return self._pool.num_freed(held) + num_pledged + sum(victim.num_wanted for victim in victims)

    def _loss(self, sequence: Sequence) -> Loss:
        size, num_freed = self._pool.block_size, sequence.blocks.num_exclusive()
        # What others hold too stays in the cache.
        num_shared = sequence.blocks.num_held - num_freed
        num_lost = max(0, sequence.num_computed_tokens - num_shared * size)
        num_remote = max(0, min(sequence.num_remote_tokens // size - num_shared, num_lost // size))
        return Loss(num_lost, num_freed, num_remote * size, num_remote)

    def _cheapest(self, sequence: Sequence, loss: Loss) -> tuple[float, PreemptionKind]:
        # In the middle of its prompt it is not worth the bookkeeping.
        is_decoding = sequence in self._running.decoding
        may_recall = is_decoding and self._may_recall(sequence)
        if may_recall and self._always_recalls:
            return self.costs.remote_s(loss), PreemptionKind.REMOTE
        may_swap = is_decoding and sequence.blocks.num_held <= self._swap.num_free
        return self.costs.cheapest(loss, may_swap=may_swap, may_recall=may_recall)

    def _may_recall(self, sequence: Sequence) -> bool:
        # What bypasses the cache is in nobody's.
        return self._recalls and sequence.num_remote_tokens > 0 and not sequence.spec.bypass_cache

    def _take_blocks(self, sequence: Sequence) -> None:
        _, kind = self._cheapest(sequence, self._loss(sequence))
        if kind is PreemptionKind.SWAP:
            self._swap_out(sequence)
        sequence.is_recallable = kind is PreemptionKind.REMOTE
        self.counts[kind] += 1
        self._running.remove(sequence)
        sequence.status = SequenceStatus.PREEMPTED
        sequence.num_preemptions += 1
        sequence.victim_of = self.num_rounds
        sequence.refused_with = None
        sequence.forget_blocks()

    def _swap_out(self, sequence: Sequence) -> None:
        begin_s, places = self._clock(), sequence.blocks.held_places()
        sequence.saved = self._swap.save(places)
        self.costs.note_swap(len(places), self._clock() - begin_s)

    def note_fork(self, fork: Sequence) -> None:
        """A candidate for which there is no room begins as one that was preempted."""
        self.counts[PreemptionKind.RECOMPUTE] += 1
        fork.status = SequenceStatus.PREEMPTED
        fork.num_preemptions += 1
