"""Workers that follow a script: real gRPC servers in this process, behind which nothing is computed."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import grpc

from paceline.core.errors import PacelineError
from paceline.core.request import FinishReason, FirstToken, SequenceSpec, TokenLogprob
from paceline.core.ticket import KvTicket
from paceline.runtime.grpc_status import abort_with
from paceline.runtime.wire_internal import (
    fingerprint_from_proto,
    fingerprint_to_proto,
    finish_reason_to_proto,
    first_token_to_proto,
    prompt_scored_to_proto,
    spec_from_proto,
    ticket_to_proto,
)
from paceline.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    engine_pb2,
    inference_pb2,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from tests.factories import FINGERPRINT, make_ticket

Context = grpc.aio.ServicerContext[Any, Any]
PrefillScript = Callable[["ScriptedWorker", SequenceSpec], AsyncIterator[prefill_pb2.PrefillResponse]]
DecodeScript = Callable[["ScriptedWorker", SequenceSpec, bool], AsyncIterator[decode_pb2.SequenceEvent]]


class BreakStreamError(Exception):
    """Raised by a script that breaks the stream it runs on."""


def next_token(token_ids: tuple[int, ...], candidate: int = 0) -> int:
    """What every scripted worker says after these tokens."""
    return (31 * sum(token_ids) + len(token_ids) + 7 * candidate) % 1000


def oracle(spec: SequenceSpec, candidate: int = 0) -> tuple[int, ...]:
    """The whole output of a sequence's candidate, earlier output included."""
    output = spec.output_ids
    while len(output) < spec.max_tokens:
        output += (next_token(spec.prompt_ids + output, candidate),)
    return output


class ScriptedWorker(
    prefill_pb2_grpc.PrefillServiceServicer,
    decode_pb2_grpc.DecodeServiceServicer,
    kv_transfer_pb2_grpc.KvTransferServiceServicer,
    worker_pb2_grpc.WorkerServiceServicer,
):
    """Takes the next script for each piece of work, the good one when there is none; keeps what it was asked."""

    def __init__(self, name: str, role: inference_pb2.WorkerRole, *, epoch: int = 1) -> None:
        self.info = worker_pb2.GetInfoResponse(
            worker_id=name,
            role=role,
            boot_epoch=epoch,
            fingerprint=fingerprint_to_proto(FINGERPRINT),
            model_id="scripted",
            max_model_tokens=1000,
            vocab_size=1000,
            num_blocks=100,
            block_bytes=64,
            max_num_batched_tokens=100,
        )
        self.load = worker_pb2.WatchLoadResponse(num_free_blocks=100)
        self.address = ""
        self.prefill_scripts: deque[PrefillScript] = deque()
        self.decode_scripts: deque[DecodeScript] = deque()
        self.prefills: list[SequenceSpec] = []
        self.ended_prefills: list[SequenceSpec] = []
        self.submits: list[tuple[SequenceSpec, bool]] = []
        self.cancels: list[tuple[str, int]] = []
        # (attempt, candidate) of those that were cancelled alone.
        self.cancelled_candidates: list[tuple[int, int]] = []
        self.released: list[str] = []
        self.num_asked = 0
        # Set, and replaced, whenever one of these lists has grown.
        self._changed = asyncio.Event()
        self._streams: set[asyncio.Queue[decode_pb2.DecodeResponse | None]] = set()
        self._watches: set[asyncio.Queue[worker_pb2.WatchLoadResponse | None]] = set()
        self._server: grpc.aio.Server | None = None

    # -- life

    async def start(self) -> None:
        """Listens: on a free port the first time, on the same one later."""
        self._server = grpc.aio.server()
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, self._server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, self._server)
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(self.address or '127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        """Dies: every call under way breaks."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        """Comes back at the same address in another life."""
        await self.stop()
        self.info.boot_epoch += 1
        await self.start()

    def break_decode_streams(self) -> None:
        """Ends the Decode streams only; the worker is well otherwise."""
        for stream in self._streams:
            stream.put_nowait(None)

    def break_load_streams(self) -> None:
        """Ends the WatchLoad streams only; the worker is well otherwise."""
        for watch in self._watches:
            watch.put_nowait(None)

    def report(self, **load: Any) -> None:
        """Sends another load report."""
        self.load = worker_pb2.WatchLoadResponse(**({"num_free_blocks": 100} | load))
        for watch in self._watches:
            watch.put_nowait(self.load)

    @property
    def num_watches(self) -> int:
        """WatchLoad streams that somebody reads."""
        return len(self._watches)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits until what it was asked fulfils a condition."""
        async with asyncio.timeout(10):
            while not condition():
                await self._changed.wait()

    def _note(self, kept: list[Any], value: Any) -> None:
        kept.append(value)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # -- what it serves

    async def GetInfo(  # noqa: N802 - the contract's name
        self, request: worker_pb2.GetInfoRequest, context: Context
    ) -> worker_pb2.GetInfoResponse:
        """Its facts."""
        self.num_asked += 1
        self._wake()
        return self.info

    async def GetExpertLoad(  # noqa: N802 - the same
        self, request: worker_pb2.GetExpertLoadRequest, context: Context
    ) -> worker_pb2.GetExpertLoadResponse:
        """It has no experts."""
        return worker_pb2.GetExpertLoadResponse()

    async def WatchLoad(  # noqa: N802
        self, request: worker_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """The load now, and each new one."""
        watch: asyncio.Queue[worker_pb2.WatchLoadResponse | None] = asyncio.Queue()
        self._watches.add(watch)
        try:
            yield self.load
            while load := await watch.get():
                yield load
        finally:
            self._watches.discard(watch)

    async def Prefill(  # noqa: N802
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """Follows the next prefill script."""
        spec = spec_from_proto(request.context, request.sequence)
        self._note(self.prefills, spec)
        script = self.prefill_scripts.popleft() if self.prefill_scripts else good_prefill
        try:
            async for response in script(self, spec):
                yield response
        except PacelineError as error:
            await abort_with(context, error)
        except BreakStreamError:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        finally:
            self._note(self.ended_prefills, spec)

    async def Decode(  # noqa: N802
        self, request_iterator: AsyncIterator[decode_pb2.DecodeRequest], context: Context
    ) -> AsyncIterator[decode_pb2.DecodeResponse]:
        """Follows a decode script for each sequence."""
        stream: asyncio.Queue[decode_pb2.DecodeResponse | None] = asyncio.Queue()
        self._streams.add(stream)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        try:
            while response := await stream.get():
                yield response
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        finally:
            self._streams.discard(stream)
            reader.cancel()

    async def ReleaseLeases(  # noqa: N802
        self, request: kv_transfer_pb2.ReleaseLeasesRequest, context: Context
    ) -> kv_transfer_pb2.ReleaseLeasesResponse:
        """Keeps the leases that come back."""
        for ref in request.attempts:
            self._note(self.released, f"lease-{ref.request_id}-{ref.attempt}")
        return kv_transfer_pb2.ReleaseLeasesResponse()

    async def Pull(  # noqa: N802
        self, request: kv_transfer_pb2.PullRequest, context: Context
    ) -> AsyncIterator[kv_transfer_pb2.PullResponse]:
        """Nobody pulls: decode workers follow scripts too."""
        yield kv_transfer_pb2.PullResponse()
        raise AssertionError("a scripted worker has no blocks")

    async def RenewLeases(  # noqa: N802
        self, request: kv_transfer_pb2.RenewLeasesRequest, context: Context
    ) -> kv_transfer_pb2.RenewLeasesResponse:
        """Nobody renews."""
        raise AssertionError("a scripted worker has no leases")

    async def DescribeMemory(  # noqa: N802
        self, request: kv_transfer_pb2.DescribeMemoryRequest, context: Context
    ) -> kv_transfer_pb2.DescribeMemoryResponse:
        """Nobody pulls: decode workers follow scripts too."""
        raise AssertionError("a scripted worker has no blocks")

    async def LeasePrefix(  # noqa: N802
        self, request: kv_transfer_pb2.LeasePrefixRequest, context: Context
    ) -> kv_transfer_pb2.LeasePrefixResponse:
        """Nobody borrows: decode workers follow scripts too."""
        raise AssertionError("a scripted worker has no blocks")

    async def Drain(  # noqa: N802
        self, request: worker_pb2.DrainRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """A router asks nobody to drain."""
        raise AssertionError("a router does not drain workers")

    async def _read(
        self,
        requests: AsyncIterator[decode_pb2.DecodeRequest],
        stream: "asyncio.Queue[decode_pb2.DecodeResponse | None]",
    ) -> None:
        running: dict[tuple[str, int], asyncio.Task[None]] = {}
        async for request in requests:
            if request.WhichOneof("command") == "cancel":
                key = (request.cancel.request_id, request.cancel.attempt)
                if request.cancel.HasField("candidate"):
                    self._note(self.cancelled_candidates, (request.cancel.attempt, request.cancel.candidate))
                    continue
                if key in running:
                    running[key].cancel()
                self._note(self.cancels, key)
                continue
            submit = request.submit
            spec, has_ticket = spec_from_proto(submit.context, submit.sequence), submit.HasField("ticket")
            script = self.decode_scripts.popleft() if self.decode_scripts else good_decode
            running[spec.sequence_id.request_id, spec.sequence_id.attempt] = asyncio.create_task(
                self._follow(script, spec, stream, has_ticket=has_ticket)
            )
            self._note(self.submits, (spec, has_ticket))

    async def _follow(
        self,
        script: DecodeScript,
        spec: SequenceSpec,
        stream: "asyncio.Queue[decode_pb2.DecodeResponse | None]",
        *,
        has_ticket: bool,
    ) -> None:
        try:
            async for event in script(self, spec, has_ticket):
                event.request_id, event.attempt = spec.sequence_id
                stream.put_nowait(decode_pb2.DecodeResponse(events=[event]))
        except BreakStreamError:
            stream.put_nowait(None)


# -- pieces of scripts


def ticket_of(worker: ScriptedWorker, spec: SequenceSpec) -> KvTicket:
    """The ticket of an attempt."""
    name = f"lease-{spec.sequence_id.request_id}-{spec.sequence_id.attempt}"
    fingerprint = fingerprint_from_proto(worker.info.fingerprint)
    return replace(make_ticket(name, owner_address=worker.address), fingerprint=fingerprint)


def started(worker: ScriptedWorker, spec: SequenceSpec) -> prefill_pb2.PrefillResponse:
    """The first event of a prefill; 4 tokens came from its cache, and it waited half a second."""
    ticket = ticket_to_proto(ticket_of(worker, spec))
    return prefill_pb2.PrefillResponse(
        started=prefill_pb2.PrefillStarted(ticket=ticket, cached_tokens=4, queued_s=0.5)
    )


def progress(num_tokens: int) -> prefill_pb2.PrefillResponse:
    """A chunk is computed."""
    return prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(computed_tokens=num_tokens))


def result(spec: SequenceSpec, reason: FinishReason | None = None) -> prefill_pb2.PrefillResponse:
    """The last event of a prefill; ends the candidates when they may have one token only."""
    if reason is None and spec.max_tokens == len(spec.output_ids) + 1:
        reason = FinishReason.LENGTH
    first_tokens = [
        FirstToken(next_token(spec.known_ids, candidate), reason, candidate=candidate)
        for candidate in spec.candidates
    ]
    return prefill_pb2.PrefillResponse(
        result=prefill_pb2.PrefillResult(first_tokens=map(first_token_to_proto, first_tokens))
    )


def kv_received() -> decode_pb2.SequenceEvent:
    """The hand-over is complete."""
    received = decode_pb2.KvReceived(num_blocks=3, num_bytes=192, duration_s=0.25)
    return decode_pb2.SequenceEvent(kv_received=received)


def decode_started() -> decode_pb2.SequenceEvent:
    """A decode worker computes the prompt itself."""
    return decode_pb2.SequenceEvent(started=decode_pb2.SequenceStarted(cached_tokens=8, queued_s=0.5))


def tokens(
    first_index: int, token_ids: tuple[int, ...], *, ends: bool = False, candidate: int = 0
) -> decode_pb2.SequenceEvent:
    """New tokens."""
    reason = finish_reason_to_proto(FinishReason.LENGTH if ends else None)
    return decode_pb2.SequenceEvent(
        tokens=decode_pb2.SequenceTokens(
            first_index=first_index, token_ids=token_ids, finish_reason=reason, candidate=candidate
        )
    )


def entries(spec: SequenceSpec) -> tuple[TokenLogprob, ...]:
    """What every scripted worker thinks of a prompt's tokens, from the second one on."""
    return tuple(
        TokenLogprob(token_id, -float(place)) for place, token_id in enumerate(spec.prompt_ids[1:], 1)
    )


def scored(spec: SequenceSpec, start: int, end: int) -> engine_pb2.PromptScored:
    """A chunk tells the prompt's tokens [start, end)."""
    return prompt_scored_to_proto(start, entries(spec)[start - 1 : end - 1])


def scores_in_chunks(spec: SequenceSpec) -> list[engine_pb2.PromptScored]:
    """All of them in chunks of 8; none when none were asked for."""
    num_prompt = len(spec.prompt_ids) if spec.prompt_logprobs else 0
    return [scored(spec, start, min(start + 8, num_prompt)) for start in range(1, num_prompt, 8)]


def failed(error: PacelineError) -> decode_pb2.SequenceEvent:
    """The sequence cannot go on."""
    return decode_pb2.SequenceEvent(
        failed=decode_pb2.SequenceFailed(reason=error.reason, message=str(error), facts=error.facts())
    )


# -- whole scripts


async def good_prefill(
    worker: ScriptedWorker, spec: SequenceSpec
) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
    """Everything goes well."""
    yield started(worker, spec)
    for message in scores_in_chunks(spec):
        yield prefill_pb2.PrefillResponse(prompt_scored=message)
    yield progress(len(spec.known_ids))
    yield result(spec)


async def good_decode(
    worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
    """Everything goes well."""
    async for event in decode_until(spec, has_ticket, spec.max_tokens):
        yield event


async def decode_until(
    spec: SequenceSpec, has_ticket: bool, num_tokens: int
) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
    """The events up to so many output tokens of each candidate."""
    yield kv_received() if has_ticket else decode_started()
    for message in [] if has_ticket else scores_in_chunks(spec):
        yield decode_pb2.SequenceEvent(prompt_scored=message)
    outputs = {candidate: oracle(spec, candidate) for candidate in spec.candidates}
    for index in range(len(spec.output_ids) + has_ticket, num_tokens):
        for candidate, output in outputs.items():
            ends = index == spec.max_tokens - 1
            yield tokens(index, (output[index],), ends=ends, candidate=candidate)


def prefill_that(
    *steps: Callable[[ScriptedWorker, SequenceSpec], prefill_pb2.PrefillResponse],
    then: Exception | None = None,
) -> PrefillScript:
    """Gives these responses; then fails, or hangs until it is cancelled."""

    async def script(
        worker: ScriptedWorker, spec: SequenceSpec
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """The steps, and then the end."""
        for step in steps:
            yield step(worker, spec)
        if then is not None:
            raise then
        await asyncio.Event().wait()

    return script


def decode_that(
    num_tokens: int = 0,
    *events: decode_pb2.SequenceEvent,
    then: Exception | None = None,
) -> DecodeScript:
    """Decodes up to so many output tokens, 0 for not even the prompt; then says more, fails, or hangs."""

    async def script(
        worker: ScriptedWorker, spec: SequenceSpec, has_ticket: bool
    ) -> AsyncGenerator[decode_pb2.SequenceEvent, None]:
        """The tokens, the events, and then the end."""
        if num_tokens:
            async for event in decode_until(spec, has_ticket, num_tokens):
                yield event
        for event in events:
            yield event
        if then is not None:
            raise then
        await asyncio.Event().wait()

    return script
