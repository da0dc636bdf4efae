"""Pulls the prompts of preempted sequences again from the workers that computed them, for one Decode stream."""

import asyncio
from dataclasses import dataclass
from functools import partial

from kvtransfer.lending import PrefixOwner, PrefixRequest
from paceline.core.errors import PacelineError
from paceline.core.request import SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.events import Recall
from paceline.runtime.log import get_logger
from paceline.worker.worker import Worker

_Key = tuple[SequenceId, int]

log = get_logger()


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a sequence's prompt came from, and until when anybody waits for the sequence."""

    owner: PrefixOwner
    cache_scope: str
    deadline_s: float | None  # on the event loop's clock


class Recalls:
    """One task for each candidate that waits. However it ends, the engine hears: the candidate goes on, or is released.

    That is said only after the receiver has returned: until then it may write to the blocks.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._origins: dict[SequenceId, _Origin] = {}
        self._tasks: dict[_Key, asyncio.Task[int]] = {}
        self._given_up: set[_Key] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered and nothing is under way."""
        return not (self._origins or self._tasks or self._given_up)

    def remember(self, spec: SequenceSpec, ticket: KvTicket, deadline_s: float | None) -> None:
        """The prompt has come by this ticket. Forget it when the sequence ends."""
        owner = PrefixOwner(ticket.owner_id, ticket.owner_address, ticket.boot_epoch)
        self._origins[spec.sequence_id] = _Origin(owner, spec.cache_scope, deadline_s)

    def forget(self, sequence_id: SequenceId) -> None:
        """The sequence has ended, or will be given up."""
        self._origins.pop(sequence_id, None)

    def begin(self, recall: Recall) -> None:
        """Asks for what the engine wants, and resumes the candidate with what has come."""
        key = (recall.sequence_id, recall.candidate)
        task = asyncio.create_task(self._pull(recall, self._origins[recall.sequence_id]))
        self._tasks[key] = task
        # Not in the task itself: cancelled before it begins, it would never get there.
        task.add_done_callback(partial(self._end, recall))

    def give_up(self, sequence_id: SequenceId, candidate: int) -> bool:
        """Whether the candidate waits here; then it is released as soon as nobody writes to its blocks."""
        key = (sequence_id, candidate)
        task = self._tasks.get(key)
        if task is None:
            return False
        self._given_up.add(key)
        task.cancel()
        return True

    async def aclose(self) -> None:
        """Returns when nothing is under way any more; everything has been given up before."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    async def _pull(self, recall: Recall, origin: _Origin) -> int:
        """How many of the blocks have their content in the end. A failure is a miss, and what is missing is computed."""
        worker = self._worker
        request = PrefixRequest(recall.sequence_id, origin.cache_scope, recall.token_ids)
        try:
            async with asyncio.timeout_at(origin.deadline_s):
                num_blocks = await worker.borrower.borrow(
                    origin.owner, request, recall.block_hashes, recall.block_ids, recall.num_held
                )
        except (PacelineError, TimeoutError) as error:
            log.debug("recall_failed", request_id=recall.sequence_id.request_id, error=type(error).__name__)
            return recall.num_held
        except Exception:
            log.exception("recall_broken", request_id=recall.sequence_id.request_id)
            return recall.num_held
        worker.num_blocks_pulled += num_blocks - recall.num_held
        return num_blocks

    def _end(self, recall: Recall, task: "asyncio.Task[int]") -> None:
        key = (recall.sequence_id, recall.candidate)
        del self._tasks[key]
        if key in self._given_up:
            self._given_up.remove(key)
            self._worker.engine.release_candidate(*key)
        else:
            # Nobody else cancels it, unless the process ends.
            self._worker.engine.resume(*key, recall.num_held if task.cancelled() else task.result())
