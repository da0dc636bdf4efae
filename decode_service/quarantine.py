"""Sequences whose hand-over has failed while an engine may still write to their blocks: nobody else may have those yet."""

from collections.abc import Sequence

from paceline.core.kv_layout import BlockId
from paceline.core.request import SequenceId
from paceline.worker.worker import Worker


class Quarantine:
    """Of one Decode stream. Everybody has been told of the failure already; only the blocks wait."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sequence_ids: set[SequenceId] = set()

    def __contains__(self, sequence_id: SequenceId) -> bool:
        return sequence_id in self._sequence_ids

    def release_when_settled(self, sequence_id: SequenceId, block_ids: Sequence[BlockId]) -> None:
        """Releases the sequence as soon as nothing writes to its blocks any more: now, unless an engine writes in place."""
        self._sequence_ids.add(sequence_id)
        self._worker.receiver.when_settled(block_ids, lambda: self._release(sequence_id))

    def _release(self, sequence_id: SequenceId) -> None:
        self._sequence_ids.remove(sequence_id)
        self._worker.engine.release(sequence_id)
