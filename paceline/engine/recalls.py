"""Preempted sequences whose prompt is pulled again from the worker that computed it, which may have it no more."""

from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.engine.costs import CostEstimate
from paceline.engine.events import Recall
from paceline.engine.sequence import Sequence, SequenceStatus


class Recalls:
    """Those that wait for it. Each either ends, with as much as has come, or is forgotten."""

    def __init__(self, block_size: int, costs: CostEstimate, clock: Clock) -> None:
        self._block_size = block_size
        self._costs = costs
        self._clock = clock
        self._waiting: dict[Sequence, tuple[Recall, float]] = {}

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def begin(self, sequence: Sequence) -> Recall | None:
        """What to pull for a sequence that has just come in, if anything; then it waits for that."""
        is_recallable, sequence.is_recallable = sequence.is_recallable, False
        num_held = sequence.num_computed_tokens // self._block_size
        num_blocks = sequence.num_remote_tokens // self._block_size
        if num_held >= num_blocks:
            return None
        if not is_recallable:
            self._costs.note_unasked()
            return None
        recall = Recall(
            sequence_id=sequence.sequence_id,
            candidate=sequence.candidates[0],
            token_ids=tuple(sequence.token_ids[: num_blocks * self._block_size]),
            block_hashes=sequence.blocks.places.hashes(sequence.block_hashes)[:num_blocks],
            block_ids=sequence.blocks.places.ids()[:num_blocks],
            num_held=num_held,
        )
        self._waiting[sequence] = recall, self._clock()
        sequence.status = SequenceStatus.WAITING_FOR_KV
        return recall

    def end(self, sequence: Sequence, num_blocks: int) -> None:
        """The first `num_blocks` blocks have their content. The rest is to be computed."""
        recall, started_s = self._waiting.pop(sequence)
        num_asked = len(recall.block_ids) - recall.num_held
        num_come = num_blocks - recall.num_held
        assert 0 <= num_come <= num_asked, "what comes was asked for, and what was here stays"
        self._costs.note_remote(num_asked, num_come, self._clock() - started_s)
        sequence.num_computed_tokens = num_blocks * self._block_size
        sequence.status = SequenceStatus.RUNNING

    def find(self, family: Iterable[Sequence], candidate: int) -> Sequence | None:
        """The one of a family that stands for a candidate, if it waits here."""
        return next((each for each in family if each in self._waiting and candidate in each.candidates), None)

    def forget(self, sequence: Sequence) -> None:
        """It is over, whether it waits or not."""
        self._waiting.pop(sequence, None)
