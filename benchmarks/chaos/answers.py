"""What a client saw of one answer, put together, so that two of them can be compared."""

from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from paceline.core.clock import Clock, monotonic
from paceline.v1 import inference_pb2


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate, whole."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    finish: bytes  # reason and what matched
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """All of an answer that must be the same however it was made."""

    num_prompt_tokens: int
    prompt_logprobs: tuple[bytes, ...]
    candidates: tuple[Candidate, ...]


class BrokenStreamError(Exception):
    """A stream that says something twice, out of order, or not at all."""


@dataclass(slots=True)
class _Parts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    finishes: list[inference_pb2.Finish] = field(default_factory=list)

    def whole(self, index: int) -> Candidate:
        if len(self.finishes) != 1:
            raise BrokenStreamError(f"candidate {index} has ended {len(self.finishes)} times")
        (finish,) = self.finishes
        end = inference_pb2.Finish(reason=finish.reason)
        if matched := finish.WhichOneof("matched"):
            setattr(end, matched, getattr(finish, matched))
        return Candidate(
            "".join(self.texts),
            tuple(self.token_ids),
            tuple(self.logprobs),
            end.SerializeToString(deterministic=True),
            finish.usage.output_tokens,
        )


class Reading:
    """Reads one stream; remembers how long each recovery took: from the last event before `Migrated` to the next text after it."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._clock = clock
        self._parts: defaultdict[int, _Parts] = defaultdict(_Parts)
        self._prompts: list[inference_pb2.PrefillDone] = []
        # Of each candidate: its last event, and the last one before it was lost.
        self._last_s: defaultdict[int, float] = defaultdict(clock)
        self._lost_at_s: dict[int, float] = {}
        self.gaps_s: list[float] = []
        self.num_migrations = 0

    async def read(self, events: AsyncIterator[inference_pb2.GenerateResponse]) -> Answer:
        """To the end. Raises BrokenStreamError, and what the client raises."""
        seq = 0
        async for event in events:
            if event.seq != seq:
                raise BrokenStreamError(f"event {seq} has number {event.seq}")
            seq += 1
            self._take(event)
            self._last_s[event.index] = self._clock()
        if len(self._prompts) != 1:
            raise BrokenStreamError(f"the prompt was done {len(self._prompts)} times")
        (prompt,) = self._prompts
        return Answer(
            prompt.prompt_tokens,
            tuple(each.SerializeToString(deterministic=True) for each in prompt.prompt_logprobs),
            tuple(parts.whole(index) for index, parts in sorted(self._parts.items())),
        )

    def _take(self, event: inference_pb2.GenerateResponse) -> None:
        parts = self._parts[event.index]
        match event.WhichOneof("event"):
            case "prefill_done":
                self._prompts.append(event.prefill_done)
            case "migrated":
                self.num_migrations += 1
                self._lost_at_s.setdefault(event.index, self._last_s[event.index])
            case "delta":
                parts.texts.append(event.delta.text)
                parts.token_ids += event.delta.token_ids
                parts.logprobs += (
                    each.SerializeToString(deterministic=True) for each in event.delta.logprobs
                )
                self._note_recovery(event.index)
            case "finish":
                parts.finishes.append(event.finish)
                self._note_recovery(event.index)

    def _note_recovery(self, index: int) -> None:
        lost_at_s = self._lost_at_s.pop(index, None)
        if lost_at_s is not None:
            self.gaps_s.append(self._clock() - lost_at_s)
