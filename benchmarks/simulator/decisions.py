"""The decision log: one line a step of each worker. Two runs that decide alike have the same lines."""

from collections.abc import Sequence

from paceline.core.request import SequenceId
from paceline.engine.engine import EngineStats
from paceline.engine.step import ScheduledSequence


class DecisionLog:
    """Lines such as `decode-0 12.345000 r3[0:128] r1[57:58] admitted=r3 again= preemptions=0 free=17`.

    A sequence that is scheduled behind its own past was preempted in between: it is computed again.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._ends: dict[tuple[str, SequenceId], int] = {}

    def note(
        self, worker: str, start_s: float, scheduled: Sequence[ScheduledSequence], stats: EngineStats
    ) -> None:
        """One step that the worker has taken; `stats` are those after it."""
        admitted, again = [], []
        for item in scheduled:
            known = self._ends.get((worker, item.sequence_id))
            if known is None:
                admitted.append(item.sequence_id.request_id)
            elif item.start < known:
                again.append(item.sequence_id.request_id)
            self._ends[worker, item.sequence_id] = item.end
        batch = " ".join(f"{item.sequence_id.request_id}[{item.start}:{item.end}]" for item in scheduled)
        self.lines.append(
            f"{worker} {start_s:.6f} {batch} admitted={','.join(admitted)} again={','.join(again)} "
            f"preemptions={stats.num_preemptions} free={stats.num_free_blocks}"
        )
