"""Pulls what an engine recalls from the workers that are believed to have it cached, for the sequences of one caller."""

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial

from kvtransfer.lending import PrefixRequest
from paceline.core.errors import PacelineError
from paceline.core.prefix import PrefixOwner
from paceline.core.request import SequenceId, SequenceSpec
from paceline.engine.events import Recall
from paceline.runtime.log import get_logger
from paceline.worker.worker import Worker

log = get_logger()


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a sequence's beginning may be found, and until when anybody waits for the sequence."""

    owner: PrefixOwner
    cache_scope: str
    deadline_s: float | None  # on the event loop's clock


@dataclass(frozen=True, slots=True, eq=False)
class _Pull:
    """One that is under way, and the candidates of its sequence that somebody still wants."""

    recall: Recall
    task: "asyncio.Task[int]"
    wanted: set[int]


class Recalls:
    """One task for each sequence that waits. However it ends, the engine hears: the sequence goes on, or is released.

    That is said only after the receiver has returned: until then it may write to the blocks.
    """

    def __init__(self, worker: Worker, release: Callable[[Recall], None]) -> None:
        self._worker = worker
        self._release = release
        self._origins: dict[SequenceId, _Origin] = {}
        self._pulls: dict[tuple[SequenceId, int], _Pull] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is remembered and nothing is under way."""
        return not (self._origins or self._pulls)

    def remember(self, spec: SequenceSpec, owner: PrefixOwner, deadline_s: float | None) -> None:
        """Its beginning may be found there. Forget it when the sequence ends."""
        self._origins[spec.sequence_id] = _Origin(owner, spec.cache_scope, deadline_s)

    def forget(self, sequence_id: SequenceId) -> None:
        """The sequence has ended, or will be given up."""
        self._origins.pop(sequence_id, None)

    def begin(self, recall: Recall) -> None:
        """Asks for what the engine wants, and resumes the sequence with what has come."""
        task = asyncio.create_task(self._pull(recall, self._origins.get(recall.sequence_id)))
        self._pulls[recall.sequence_id, recall.candidate] = _Pull(recall, task, set(recall.candidates))
        # Not in the task itself: cancelled before it begins, it would never get there.
        task.add_done_callback(partial(self._end, recall))

    def give_up(self, sequence_id: SequenceId, candidates: AbstractSet[int]) -> set[int]:
        """Those of the candidates that are released here, as soon as nobody writes to their blocks; the others are the caller's.

        A sequence that waits for several candidates goes on waiting until nobody wants any of them.
        """
        ours: set[int] = set()
        for pull in self._pulls.values():
            if pull.recall.sequence_id != sequence_id or pull.wanted.isdisjoint(candidates):
                continue
            pull.wanted.difference_update(candidates)
            if not pull.wanted:
                ours |= candidates & set(pull.recall.candidates)
                pull.task.cancel()
        return ours

    async def aclose(self) -> None:
        """Returns when nothing is under way any more; everything has been given up before."""
        while self._pulls:
            await asyncio.wait([pull.task for pull in self._pulls.values()])

    async def _pull(self, recall: Recall, origin: _Origin | None) -> int:
        """How many of the blocks have their content in the end. A failure is a miss, and what is missing is computed."""
        if origin is None:
            return recall.num_held
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
        pull = self._pulls.pop((recall.sequence_id, recall.candidate))
        if not pull.wanted:
            self._release(recall)
        else:
            # Nobody else cancels it, unless the process ends.
            num_blocks = recall.num_held if task.cancelled() else task.result()
            self._worker.engine.resume(recall.sequence_id, recall.candidate, num_blocks)


def deadline_of(spec: SequenceSpec) -> float | None:
    """When the caller of a sequence that has just come stops waiting, on the event loop's clock."""
    if spec.time_budget_s is None:
        return None
    return asyncio.get_running_loop().time() + spec.time_budget_s
