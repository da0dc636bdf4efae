"""A scheduler with a runner, mostly the fake one, stepped by hand; its books are checked after every step."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from paceline.core.block_hash import BlockHash, hash_block
from paceline.core.clock import ManualClock
from paceline.core.errors import PacelineError
from paceline.core.kv_layout import BlockId, KVGroup
from paceline.core.request import FinishReason, FirstToken, SequenceId, SequenceSpec
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Runner
from paceline.engine.events import Event, Failed, NewTokens, Recall, Reserved
from paceline.engine.fake import FakeModelRunner, fake_next_token
from paceline.engine.scheduler import Scheduler
from paceline.engine.scheduler_config import SchedulerConfig
from paceline.engine.sequence import Sequence as Scheduled
from paceline.engine.sequence import SequenceRole, SequenceStatus
from paceline.engine.step import ScheduledSequence, SchedulerOutput, StepOutput
from tests.factories import BLOCK_SIZE, make_id

VOCAB_SIZE = 50
WHOLE = (KVGroup(),)
E = TypeVar("E", bound=Event)
HashBlock = Callable[[BlockHash, Sequence[int]], BlockHash]


def oracle(
    spec: SequenceSpec,
    *,
    vocab_size: int = VOCAB_SIZE,
    eos: frozenset[int] = frozenset(),
    groups: Sequence[KVGroup] = WHOLE,
    candidate: int = 0,
) -> tuple[list[int], FinishReason]:
    """All output tokens of a sequence's candidate and how it ends, computed one after the other without any engine."""
    output = list(spec.output_ids)
    while True:
        ends = (*spec.stop_token_ids, *(() if spec.ignore_eos else eos))
        banned = ends if len(output) < spec.min_tokens else ()
        known = (*spec.prompt_ids, *output)
        token_id = fake_next_token(known, spec.sampling, vocab_size, banned, groups, candidate)
        output.append(token_id)
        if token_id in spec.stop_token_ids:
            return output, FinishReason.STOP
        if token_id in eos and not spec.ignore_eos:
            return output, FinishReason.EOS
        if len(output) == spec.max_tokens:
            return output, FinishReason.LENGTH


class _Running:
    """What a sequence holds before a step."""

    def __init__(self, sequence: Scheduled) -> None:
        self.sequence = sequence
        tables = sequence.blocks.tables
        self.block_ids = [i for table in tables if not table.is_windowed for i in table.held_ids]
        self.num_pledged = sum(table.pledged for table in tables)
        self.num_wanted = sequence.blocks.num_missing(sequence.num_tokens)


class Bench:
    """Keeps everything that was said about each sequence."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        max_num_batched_tokens: int = 16,
        max_num_seqs: int = 8,
        eos: Iterable[int] = (),
        hash_block: HashBlock = hash_block,
        runner: Runner | None = None,
        groups: Sequence[KVGroup] = WHOLE,
        **policies: object,
    ) -> None:
        self.clock = ManualClock(100.0)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, groups)
        self.runner = runner or FakeModelRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, groups=groups)
        self.eos = frozenset(eos)
        config = SchedulerConfig(max_num_batched_tokens, max_num_seqs, self.eos, b"model", **policies)  # type: ignore[arg-type] # each has its field's type
        self.scheduler = Scheduler(
            config, self.pool, self.runner.memory, clock=self.clock, hash_block=hash_block
        )
        self.outputs: list[SchedulerOutput] = []
        self.events: dict[SequenceId, list[Event]] = {}

    # -- commands

    def add(
        self, spec: SequenceSpec, role: SequenceRole = SequenceRole.GENERATE, num_remote_tokens: int = 0
    ) -> SequenceId:
        """Queues a sequence a moment after the last one."""
        self.clock.advance(0.001)
        self.scheduler.add(spec, role, num_remote_tokens)
        self.events.setdefault(spec.sequence_id, [])
        return spec.sequence_id

    def commit(self, spec: SequenceSpec, *first_tokens: FirstToken) -> None:
        """Brings the KV of a parked sequence from outside, then commits it."""
        reserved = self.one(spec.sequence_id, Reserved)
        assert isinstance(self.runner, FakeModelRunner)
        fill(self.runner, self.pool.groups, spec.known_ids, reserved)
        self.scheduler.commit(spec.sequence_id, first_tokens)
        self.scheduler.check_invariants()

    def resume(self, recall: Recall, num_blocks: int) -> None:
        """Brings the first `num_blocks` of what is asked for again, then lets the sequence go on."""
        assert isinstance(self.runner, FakeModelRunner)
        fill(self.runner, self.pool.groups, recall.token_ids[: num_blocks * BLOCK_SIZE], recall)
        self.scheduler.resume(recall.sequence_id, recall.candidate, num_blocks)
        self.scheduler.check_invariants()

    def release(self, sequence_id: SequenceId, candidate: int | None = None) -> None:
        """Gives a sequence up, or one candidate of it."""
        self.scheduler.release(sequence_id, candidate)
        self.scheduler.check_invariants()

    # -- steps

    def step(self) -> SchedulerOutput:
        """Schedule, execute, update; the output's promises are checked, and so are the books."""
        running = [_Running(sequence) for sequence in self._computing()]
        num_refs = Counter(block_id for each in running for block_id in each.block_ids)
        output = self.scheduler.schedule()
        self._check(output)
        lost = [each for each in running if each.sequence.status is SequenceStatus.PREEMPTED]
        for each in lost:
            # It had to be: if it had kept what no survivor holds, there would not have been enough.
            kept = num_refs - Counter(block_id for other in lost for block_id in other.block_ids)
            num_kept = sum(block_id not in kept for block_id in each.block_ids)
            assert num_kept + each.num_pledged + each.num_wanted > self.pool.num_available, (
                "a needless victim"
            )
        computed = self.runner.execute(output) if output.scheduled else StepOutput()
        for event in self.scheduler.update(output, computed):
            self.events[event.sequence_id].append(event)
        self.scheduler.check_invariants()
        self.outputs.append(output)
        return output

    def steps(self, num_steps: int) -> None:
        """Some steps."""
        for _ in range(num_steps):
            self.step()

    def run(self, *, max_steps: int = 500) -> int:
        """Steps until nothing is scheduled any more; says how many it took."""
        for num_steps in range(max_steps):
            if not self.step().scheduled:
                return num_steps
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    # -- what came of it

    def computed(self) -> list[dict[str, int]]:
        """How many tokens of which request each step computed, in the order of the batch."""
        return [
            {item.sequence_id.request_id: len(item.token_ids) for item in output.scheduled}
            for output in self.outputs
        ]

    def tokens(self, sequence_id: SequenceId, candidate: int = 0) -> list[int]:
        """The new tokens of a sequence's candidate; that their numbers have no gap is checked."""
        new = [event for event in self.of(sequence_id, NewTokens) if event.candidate == candidate]
        for before, after in itertools.pairwise(new):
            assert after.first_index == before.first_index + len(before.token_ids)
        return [token_id for event in new for token_id in event.token_ids]

    def end(self, sequence_id: SequenceId, candidate: int = 0) -> FinishReason | PacelineError | None:
        """How a sequence's candidate ended; that it did so once, and said nothing after, is checked."""
        events = self.events[sequence_id]
        own: list[Event] = [
            event for event in events if isinstance(event, NewTokens) and event.candidate == candidate
        ]
        if own and _end_of(own[-1]) is not None:
            # What fails after that are the others.
            events = own
        else:
            events = [event for event in events if event in own or not isinstance(event, NewTokens)]
        ends = [event for event in events if _end_of(event) is not None]
        if not ends:
            return None
        assert ends == [events[-1]], "an end is one, and the last word"
        return _end_of(ends[0])

    def of(self, sequence_id: SequenceId, kind: type[E]) -> list[E]:
        """The events of one kind."""
        return [event for event in self.events[sequence_id] if isinstance(event, kind)]

    def one(self, sequence_id: SequenceId, kind: type[E]) -> E:
        """The only event of its kind."""
        (event,) = self.of(sequence_id, kind)
        return event

    def _computing(self) -> list[Scheduled]:
        running = self.scheduler._running
        return [*running.decoding, *running.prefilling]

    def _check(self, output: SchedulerOutput) -> None:
        config = self.scheduler.config
        assert sum(len(item.token_ids) for item in output.scheduled) <= config.max_num_batched_tokens
        assert len(output.scheduled) <= config.max_num_seqs
        assert len({(item.sequence_id, item.candidate) for item in output.scheduled}) == len(output.scheduled)
        assert all(item.token_ids for item in output.scheduled), "nothing to compute is not scheduled"
        written: set[BlockId | None] = set()
        for item in output.scheduled:
            size = self.pool.block_size
            for table in item.block_tables:
                mine = set(table[item.start // size : -(-item.end // size)])
                assert None not in mine, "a token is computed into no block"
                assert not mine & written, "two tables write to one block"
                written |= mine


def _end_of(event: Event) -> FinishReason | PacelineError | None:
    if isinstance(event, Failed):
        return event.error
    return event.finish_reason if isinstance(event, NewTokens) else None


def fill(
    runner: FakeModelRunner,
    groups: Sequence[KVGroup],
    token_ids: tuple[int, ...],
    reserved: Reserved | Recall,
) -> None:
    """Writes a prompt's KV as a receiver would: into the blocks that do not hold it already."""
    for place, (ordinal, _) in list(enumerate(places(groups, len(token_ids))))[reserved.num_held :]:
        tokens = token_ids[ordinal * BLOCK_SIZE : (ordinal + 1) * BLOCK_SIZE]
        table = (*[None] * ordinal, reserved.block_ids[place])
        runner._write(ScheduledSequence(make_id(), tokens, ordinal * BLOCK_SIZE, (table,)))


def places(groups: Sequence[KVGroup], num_tokens: int) -> list[tuple[int, int]]:
    """What a hand-over of so many tokens moves: (which block, of which group), in order."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return sorted(
        (ordinal, index)
        for index, group in enumerate(groups)
        for ordinal in range(num_blocks)
        if any(
            group_sees(group, num_tokens, position)
            for position in range(ordinal * BLOCK_SIZE, (ordinal + 1) * BLOCK_SIZE)
        )
    )


def group_sees(group: KVGroup, position: int, other: int) -> bool:
    """Whether the token at `position` sees the one at `other`."""
    window, num_sink_tokens = group.view
    return other <= position and (window is None or position - other < window or other < num_sink_tokens)
