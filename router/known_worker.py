"""A worker that is there: what it has said of itself, and how busy it is."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.prefix import WorkerKey
from paceline.core.request import BootEpoch, WorkerId
from paceline.runtime.wire_internal import fingerprint_from_proto
from paceline.runtime.wire_pace import fast_lane_of, pace_of, pending_of
from paceline.v1 import worker_pb2
from router.assignments import Assignments
from router.decode_link import DecodeLink
from router.views import QueueFacts, WorkerView

# Three reports that have not come: what it has to do by now is not known any more.
_STALE_S = 3.0


@dataclass(slots=True)
class KnownWorker:
    """A worker that is there. It is looked at several times for each request: what stays the same until its next report is kept."""

    address: str
    info: worker_pb2.GetInfoResponse
    load: worker_pb2.WatchLoadResponse
    link: DecodeLink | None
    reported_s: float
    # Whether it has refused a prefill since it is about to end; its load report follows, or the end of its stream.
    has_refused: bool = False
    # Who wants to hear when it is lost from sight.
    losing: dict[Callable[[], None], None] = field(default_factory=dict)
    key: WorkerKey = field(init=False)
    _digest: bytes = field(init=False)
    _queue: QueueFacts | None = field(init=False)

    def __post_init__(self) -> None:
        self.key = key_of(self.info)
        self._digest = fingerprint_from_proto(self.info.fingerprint).digest()
        self.note_load(self.load, self.reported_s)

    def note_load(self, load: worker_pb2.WatchLoadResponse, now_s: float) -> None:
        """A report has come."""
        self.load, self.reported_s = load, now_s
        self._queue = _queue_of(self.info, load)

    @property
    def is_there(self) -> bool:
        """Whether it can be given work: a decode worker whose stream has broken is as good as gone."""
        return self.link is None or self.link.is_open

    @property
    def is_draining(self) -> bool:
        """Whether it takes nothing new, as far as anyone has heard."""
        return self.load.draining or self.has_refused or (self.link is not None and self.link.is_leaving)

    def view(self, assignments: Assignments, now_s: float) -> WorkerView:
        assigned = assignments.pending(self.key)
        is_load_known = now_s - self.reported_s < _STALE_S
        return WorkerView(
            key=self.key,
            address=self.address,
            fingerprint=self._digest,
            block_size=self.info.fingerprint.block_size,
            num_blocks=self.info.num_blocks,
            num_free_blocks=self.load.num_free_blocks,
            num_running=self.load.num_running,
            num_waiting=self.load.num_waiting,
            num_pending_tokens=self.load.num_pending_tokens,
            draining=self.is_draining,
            cooling_down=self.load.cooling_down,
            is_load_known=is_load_known,
            assigned=assigned,
            queue=self._queue if is_load_known else None,
            num_assigned_tokens=sum(assigned.fast) + sum(assigned.normal),
            num_assigned_sequences=assignments.num_sequences(self.key),
        )


def key_of(info: worker_pb2.GetInfoResponse) -> WorkerKey:
    """One life of one worker."""
    return WorkerKey(WorkerId(info.worker_id), BootEpoch(info.boot_epoch))


def _queue_of(info: worker_pb2.GetInfoResponse, load: worker_pb2.WatchLoadResponse) -> QueueFacts | None:
    pace = pace_of(load)
    if pace is None or not info.max_num_batched_tokens:
        return None
    return QueueFacts(
        pace=pace,
        pending=pending_of(load),
        waiting=(load.num_waiting_realtime, load.num_waiting_standard, load.num_waiting_batch),
        is_blocked=load.is_blocked,
        max_seats=load.max_seats,
        max_step_tokens=info.max_num_batched_tokens,
        fast_lane=fast_lane_of(info),
    )
