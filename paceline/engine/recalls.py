"""Sequences that come in while another worker is believed to have their beginning: whether it is pulled from there.

A newcomer's has been cached elsewhere; a preempted one's prompt was computed elsewhere. Either may be there no more.
"""

from collections.abc import Iterable

from paceline.core.clock import Clock
from paceline.engine.costs import CostEstimate
from paceline.engine.events import Recall
from paceline.engine.sequence import Sequence, SequenceStatus


class Recalls:
    """Those that wait for it. Each either ends, with as much as has come, or is forgotten."""

    def __init__(self, block_size: int, costs: CostEstimate, clock: Clock, *, is_always: bool) -> None:
        self._block_size = block_size
        self._is_always = is_always
        self._costs = costs
        self._clock = clock
        self._waiting: dict[Sequence, tuple[Recall, float]] = {}

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._waiting

    def begin(self, sequence: Sequence) -> Recall | None:
        """What to pull for a sequence that has just come in, if anything; then it waits for that."""
        is_recallable, sequence.is_recallable = sequence.is_recallable, False
        num_held = sequence.num_computed_tokens // self._block_size
        # The last token is computed here, whatever is cached: what follows is sampled from it.
        num_blocks = min(sequence.num_remote_tokens, sequence.num_tokens - 1) // self._block_size
        num_lacking = num_blocks - num_held
        if num_lacking <= 0:
            return None
        is_cheaper = self._costs.is_pull_cheaper(num_lacking, num_lacking * self._block_size)
        if not is_recallable or not (is_cheaper or self._is_always):
            self._costs.note_unasked()
            return None
        recall = Recall(
            sequence_id=sequence.sequence_id,
            candidates=sequence.candidates,
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
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            sequence.num_pulled_blocks = num_come
        sequence.status = SequenceStatus.RUNNING

    def find(self, family: Iterable[Sequence], candidate: int) -> Sequence | None:
        """The one of a family whose Recall was named by a candidate, if it waits here."""
        waiting = (each for each in family if each in self._waiting)
        return next((each for each in waiting if self._waiting[each][0].candidate == candidate), None)

    def forget(self, sequence: Sequence) -> None:
        """It is over, whether it waits or not."""
        self._waiting.pop(sequence, None)
