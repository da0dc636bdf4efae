"""A session with a decode worker, and a prefill worker to hand over from, both whole and in this process."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from decode_service.session import DecodeSession
from paceline.core.prefix import PrefixHint
from paceline.core.request import SequenceId, SequenceSpec
from paceline.core.ticket import KvTicket
from paceline.engine.fake import FakeModelRunner
from paceline.runtime.channels import Channels
from paceline.runtime.wire_internal import (
    finish_reason_from_proto,
    prefix_hint_to_proto,
    spec_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from paceline.v1 import decode_pb2, prefill_pb2
from paceline.v1.prefill_pb2_grpc import PrefillServiceStub
from paceline.worker.worker import Worker
from tests.engine.runners import GatedRunner
from tests.factories import BLOCK_SIZE, make_spec
from tests.worker.bench import (
    DECODE,
    NUM_BLOCKS,
    PREFILL,
    VOCAB_SIZE,
    require_empty,
    serving_worker,
    until,
)

SPEC = make_spec(prompt_ids=tuple(range(20, 38)))  # 4 full blocks and a half


@dataclass
class Pair:
    """Both tiers, gates before their runners, and a session with the decode worker."""

    prefill: Worker
    decode: Worker
    prefill_gate: GatedRunner
    decode_gate: GatedRunner
    session: DecodeSession
    channels: Channels
    # Ends the prefill worker, as if it had been killed.
    stop_prefill: Callable[[], Awaitable[None]]

    def call_prefill(
        self, spec: SequenceSpec, hint: PrefixHint | None = None
    ) -> "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]":
        """The prompt is computed, apart from what the hint's owner has of it."""
        context, sequence = spec_to_proto(spec)
        request = prefill_pb2.PrefillRequest(
            context=context, sequence=sequence, prefix_hint=prefix_hint_to_proto(hint)
        )
        return PrefillServiceStub(self.channels.get(self.prefill.address)).Prefill(request)

    async def started(self, spec: SequenceSpec, hint: PrefixHint | None = None) -> prefill_pb2.PrefillStarted:
        """What is said of the beginning of a prefill that is then done."""
        responses = [response async for response in self.call_prefill(spec, hint)]
        return responses[0].started

    async def ticket(self, spec: SequenceSpec = SPEC) -> KvTicket:
        """The ticket of a prefill that is done."""
        return ticket_from_proto((await self.started(spec)).ticket)

    def submit(
        self, spec: SequenceSpec, ticket: KvTicket | None = None, hint: PrefixHint | None = None
    ) -> None:
        """What the router sends."""
        self.session.submit(submit_message(spec, ticket, hint))

    def cancel(self, spec: SequenceSpec, candidate: int | None = None) -> None:
        """What the router sends when the client has left, or one candidate has come to its stop string."""
        request_id, attempt = spec.sequence_id
        self.session.cancel(decode_pb2.Cancel(request_id=request_id, attempt=attempt, candidate=candidate))

    async def until_ends(self, spec: SequenceSpec, *candidates: int) -> dict[int, tuple[int, ...]]:
        """The tokens of each candidate of a sequence, once these have ended; others must not have."""
        tokens: dict[int, tuple[int, ...]] = {}
        ended: set[int] = set()
        async with asyncio.timeout(20):
            while ended != set(candidates):
                for event in await self.session.take_events():
                    assert not event.HasField("failed")
                    new = event.tokens
                    tokens[new.candidate] = tokens.get(new.candidate, ()) + tuple(new.token_ids)
                    if new.finish_reason:
                        ended.add(new.candidate)
        return {candidate: each for candidate, each in tokens.items() if each}

    async def until_end(self, *specs: SequenceSpec) -> dict[SequenceId, list[decode_pb2.SequenceEvent]]:
        """Every event of these sequences, up to the end of each."""
        ids = [spec.sequence_id for spec in specs]
        events: dict[SequenceId, list[decode_pb2.SequenceEvent]] = {i: [] for i in ids}
        async with asyncio.timeout(20):
            while not all(events[i] and is_end(events[i][-1]) for i in ids):
                for event in await self.session.take_events():
                    events[SequenceId(event.request_id, event.attempt)].append(event)  # type: ignore[arg-type] # a RequestId
        return events

    async def require_empty(self) -> None:
        """No block and no lease is left on either side, and nothing in the session."""
        await until(lambda: self.prefill.is_idle and self.decode.is_idle)
        session = self.session
        await until(lambda: not (session._live or session._hand_overs or session._reservations))
        await until(lambda: session._recalls.is_empty)
        await require_empty(self.prefill)
        await require_empty(self.decode)


@asynccontextmanager
async def open_pair(
    directory: Path, *, num_decode_blocks: int = NUM_BLOCKS, victim: str = "cost"
) -> AsyncIterator[Pair]:
    """Both, with fake runners."""
    num_blocks = (NUM_BLOCKS, num_decode_blocks)
    gates = [GatedRunner(FakeModelRunner(each, BLOCK_SIZE, VOCAB_SIZE)) for each in num_blocks]
    channels = Channels()
    async with AsyncExitStack() as killed:
        prefill = await killed.enter_async_context(
            serving_worker(directory, "prefill-0", PREFILL, runner=gates[0])
        )
        async with serving_worker(
            directory, "decode-0", DECODE, runner=gates[1], num_blocks=num_decode_blocks, victim=victim
        ) as decode:
            session = DecodeSession(decode)
            yield Pair(prefill, decode, gates[0], gates[1], session, channels, killed.aclose)
            for gate in gates:
                gate.open()
            await session.aclose()
            await channels.aclose()


def submit_message(
    spec: SequenceSpec, ticket: KvTicket | None = None, hint: PrefixHint | None = None
) -> decode_pb2.Submit:
    """The message for it."""
    context, sequence = spec_to_proto(spec)
    proto = ticket_to_proto(ticket) if ticket else None
    return decode_pb2.Submit(
        context=context, sequence=sequence, ticket=proto, prefix_hint=prefix_hint_to_proto(hint)
    )


def is_end(event: decode_pb2.SequenceEvent) -> bool:
    """Whether it is the last one of a sequence, or of a candidate."""
    return event.HasField("failed") or finish_reason_from_proto(event.tokens.finish_reason) is not None


def kinds_of(events: Sequence[decode_pb2.SequenceEvent]) -> list[str | None]:
    """What happened, in order."""
    return [event.WhichOneof("event") for event in events]


def token_ids_of(events: Sequence[decode_pb2.SequenceEvent]) -> tuple[int, ...]:
    """All tokens of one candidate."""
    return tuple(token_id for event in events for token_id in event.tokens.token_ids)
