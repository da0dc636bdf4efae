"""What must hold of a scheduler's books between two steps; tests ask after every one."""

from collections.abc import Mapping

from paceline.core.request import SequenceId
from paceline.engine.admission import Admission
from paceline.engine.block_pool import BlockPool
from paceline.engine.running import Running
from paceline.engine.sequence import Sequence, SequenceStatus


def check_invariants(
    pool: BlockPool,
    families: Mapping[SequenceId, list[Sequence]],
    waiting: Admission,
    running: Running,
    max_num_seqs: int,
) -> None:
    """Blocks are whole, and every sequence is in the one place that its status says."""
    sequences = [sequence for family in families.values() for sequence in family]
    tables = [table for sequence in sequences for table in sequence.blocks.tables]
    pool.check_invariants([table.held_ids for table in tables], sum(table.pledged for table in tables))
    for sequence in sequences:
        _check_sequence(sequence, waiting, running)
    assert sum(1 for _ in running) + len(waiting) <= len(sequences), "a forgotten sequence is still queued"
    for queue in (waiting.fast, waiting.normal):
        assert queue.num_pending_tokens == sum(s.num_tokens for s in queue), "tokens are miscounted"
    for family in families.values():
        candidates = [candidate for sequence in family for candidate in sequence.candidates]
        assert candidates, "a family without candidates is still known"
        assert len(set(candidates)) == len(candidates), "two sequences of one candidate"
    is_one_family = sum(1 for _ in running) == 1
    assert running.num_seats <= max_num_seqs or is_one_family, "more sequences than seats"


def _check_sequence(sequence: Sequence, waiting: Admission, running: Running) -> None:
    status, blocks = sequence.status, sequence.blocks
    waits = status in (SequenceStatus.WAITING, SequenceStatus.PREEMPTED)
    computes = sequence in running.decoding or sequence in running.prefilling
    assert (sequence in waiting) == waits
    assert (sequence in running.parked) == (status is SequenceStatus.WAITING_FOR_KV)
    assert computes == (status is SequenceStatus.RUNNING)
    assert not (waits and not blocks.is_empty), "a waiting sequence holds blocks"
    assert not sequence.saved or waits, "what is swapped out does not run"
    assert sequence.num_computed_tokens <= blocks.num_tokens_held, "computed without a block"
    if sequence in running.decoding:
        assert sequence.num_uncomputed_tokens == 1 == len(sequence.candidates), "a decode is one token"
    is_missed = sequence.owes_prompt_logprobs and sequence.num_computed_tokens >= sequence.num_scored_tokens
    assert not is_missed, "a prompt token's log probability was passed over"
