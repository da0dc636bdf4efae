"""What the client of one request is told: the dispatcher's events as responses, with text in place of tokens."""

from dataclasses import dataclass, replace

from paceline.core.request import FinishReason, StopConditions
from paceline.runtime.wire_internal import finish_reason_to_proto, logprob_to_proto
from paceline.v1 import inference_pb2
from router.detokenizer import Detokenizer
from router.job import DispatchEvent, Placed, PromptComputed, PromptProgress, Tokens
from router.timeline import RequestTimeline
from router.tokenizer import Tokenizer

_Response = inference_pb2.GenerateResponse


@dataclass(slots=True)
class _Candidate:
    """What one candidate has said."""

    detokenizer: Detokenizer
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = None


class OutputStream:
    """Numbers the responses, holds text back where a stop string may be coming, and counts what was used."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stopping: StopConditions,
        timeline: RequestTimeline,
        *,
        request_id: str,
        num_prompt_tokens: int,
        queue_position: int,
        n: int = 1,
    ) -> None:
        self._candidates = [_Candidate(_detokenizer(tokenizer, stopping)) for _ in range(n)]
        self._stopping = stopping
        self._timeline = timeline
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._queue_position = queue_position
        self._num_cached_tokens: int | None = None
        # What is told of the computed prompt, until the first tokens are: they do not wait for it to be sent.
        self._prefill_done: inference_pb2.PrefillDone | None = None
        self._is_accepted = False
        self._num_responses = 0
        # Set once every candidate has ended: how the last one did.
        self.finish_reason: FinishReason | None = None

    @property
    def num_output_tokens(self) -> int:
        """Of all candidates."""
        return sum(candidate.num_output_tokens for candidate in self._candidates)

    def has_ended(self, candidate: int) -> bool:
        """Whether the client has been told how a candidate ended."""
        return self._candidates[candidate].finish_reason is not None

    def take(self, event: DispatchEvent) -> list[_Response]:
        """The responses that an event gives; after the last one `finish_reason` is set."""
        match event:
            case Placed():
                return [self._placed(event)]
            case PromptProgress():
                return self._progress(event)
            case PromptComputed():
                self._prompt_computed(event)
                return []
            case Tokens():
                return self._tokens(event)

    def _placed(self, event: Placed) -> _Response:
        # The first one that it hears of need not be the first attempt: a worker may be gone before it is asked.
        if self._is_accepted:
            migrated = inference_pb2.Migrated(attempt=event.attempt, reason=event.reason)
            return self._response(event.candidate, migrated=migrated)
        self._is_accepted = True
        mode = inference_pb2.MODE_LOCAL if event.is_local else inference_pb2.MODE_DISAGGREGATED
        accepted = inference_pb2.Accepted(
            request_id=self._request_id, mode=mode, queue_position=self._queue_position
        )
        return self._response(accepted=accepted)

    def _progress(self, event: PromptProgress) -> list[_Response]:
        # A later attempt computes the prompt again, and earlier output with it; the client has seen that.
        if self._num_cached_tokens is not None:
            return []
        computed_tokens = min(event.num_computed_tokens, self._num_prompt_tokens)
        progress = inference_pb2.Progress(
            computed_tokens=computed_tokens, prompt_tokens=self._num_prompt_tokens
        )
        return [self._response(progress=progress)]

    def _prompt_computed(self, event: PromptComputed) -> None:
        # Later attempts compute the prompt again; for the client it happened once.
        if self._num_cached_tokens is not None:
            return
        self._num_cached_tokens = event.num_cached_tokens
        self._prefill_done = inference_pb2.PrefillDone(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=event.num_cached_tokens,
            prefill_worker=event.worker,
            prompt_logprobs=event.prompt_logprobs,
        )

    def _told_prompt(self) -> list[_Response]:
        """That the prompt is computed, once."""
        done, self._prefill_done = self._prefill_done, None
        return [] if done is None else [self._response(prefill_done=done)]

    def _tokens(self, event: Tokens) -> list[_Response]:
        # The token that ends the output is no part of its text, unless the client wants to see it.
        ends_hidden = (
            event.finish_reason in (FinishReason.STOP, FinishReason.EOS) and not self._stopping.include_stop
        )
        shown = event.token_ids[:-1] if ends_hidden else event.token_ids
        detokenizer = self._candidates[event.candidate].detokenizer
        delta = detokenizer.push(shown)
        if delta.matched_stop is not None:
            counted = replace(
                event,
                token_ids=event.token_ids[: delta.num_tokens],
                logprobs=event.logprobs[: delta.num_tokens],
            )
            return [
                *self._delta(delta.text, counted),
                self._finish(event.candidate, FinishReason.STOP, stop=delta.matched_stop),
            ]
        if event.finish_reason is None:
            return self._delta(delta.text, event)
        # Without a token, a repeated message brings an end whose token was seen before.
        is_stop = event.finish_reason is FinishReason.STOP and event.token_ids
        stop_token_id = event.token_ids[-1] if is_stop else None
        return [
            *self._delta(delta.text + detokenizer.flush(), event),
            self._finish(event.candidate, event.finish_reason, stop_token_id=stop_token_id),
        ]

    def _delta(self, text: str, event: Tokens) -> list[_Response]:
        """New output, and after the first of it that the prompt is computed."""
        if not text and not event.token_ids:
            return self._told_prompt()
        self._candidates[event.candidate].num_output_tokens += len(event.token_ids)
        logprobs = map(logprob_to_proto, event.logprobs)
        delta = inference_pb2.Delta(text=text, token_ids=event.token_ids, logprobs=logprobs)
        return [self._response(event.candidate, delta=delta), *self._told_prompt()]

    def _finish(
        self,
        index: int,
        reason: FinishReason,
        *,
        stop: str | None = None,
        stop_token_id: int | None = None,
    ) -> _Response:
        self._candidates[index].finish_reason = reason
        if all(candidate.finish_reason for candidate in self._candidates):
            self.finish_reason = reason
        usage = inference_pb2.Usage(
            prompt_tokens=self._num_prompt_tokens,
            cached_tokens=self._num_cached_tokens or 0,
            output_tokens=self._candidates[index].num_output_tokens,
        )
        finish = inference_pb2.Finish(
            reason=finish_reason_to_proto(reason),
            stop=stop,
            stop_token_id=stop_token_id,
            usage=usage,
            timeline=self._timeline.to_proto(),
        )
        return self._response(index, finish=finish)

    def _response(
        self,
        index: int = 0,
        *,
        accepted: inference_pb2.Accepted | None = None,
        prefill_done: inference_pb2.PrefillDone | None = None,
        delta: inference_pb2.Delta | None = None,
        progress: inference_pb2.Progress | None = None,
        migrated: inference_pb2.Migrated | None = None,
        finish: inference_pb2.Finish | None = None,
    ) -> _Response:
        response = _Response(
            seq=self._num_responses,
            index=index,
            accepted=accepted,
            prefill_done=prefill_done,
            delta=delta,
            progress=progress,
            migrated=migrated,
            finish=finish,
        )
        self._num_responses += 1
        return response


def _detokenizer(tokenizer: Tokenizer, stopping: StopConditions) -> Detokenizer:
    return Detokenizer(
        tokenizer, stopping.stop, include_stop=stopping.include_stop, min_tokens=stopping.min_tokens
    )
