"""What the client of a request is told."""

import pytest

from paceline.core.clock import ManualClock
from paceline.core.request import FinishReason, StopConditions
from paceline.v1 import generation_pb2, inference_pb2
from router.job import DispatchEvent, Placed, PromptComputed, PromptProgress, Tokens
from router.output import OutputStream
from router.timeline import RequestTimeline
from router.tokenizer import Tokenizer

TEXT = "one two three four"
Response = inference_pb2.GenerateResponse


@pytest.fixture
def ids(byte_level: Tokenizer) -> tuple[int, ...]:
    """The tokens of TEXT."""
    return byte_level.encode(TEXT)


def _stream(tokenizer: Tokenizer, n: int = 1, **stopping: object) -> OutputStream:
    conditions = StopConditions(**stopping)  # type: ignore[arg-type] # each has its field's type
    timeline = RequestTimeline(ManualClock())
    return OutputStream(
        tokenizer, conditions, timeline, request_id="minted", num_prompt_tokens=7, queue_position=2, n=n
    )


def _take(output: OutputStream, *events: DispatchEvent) -> list[Response]:
    """All responses, whose numbers have no gap."""
    responses = [response for event in events for response in output.take(event)]
    assert [response.seq for response in responses] == list(range(len(responses)))
    return responses


def _one_by_one(token_ids: tuple[int, ...], reason: FinishReason | None) -> list[DispatchEvent]:
    """Each token as an event, the last one with the reason."""
    ends = [None] * (len(token_ids) - 1) + [reason]
    return [Tokens((token_id,), end) for token_id, end in zip(token_ids, ends, strict=True)]


def _text(responses: list[Response]) -> str:
    return "".join(response.delta.text for response in responses)


def _token_ids(responses: list[Response]) -> tuple[int, ...]:
    return tuple(token_id for response in responses for token_id in response.delta.token_ids)


def _finish(output: OutputStream, responses: list[Response]) -> inference_pb2.Finish:
    """The one end, which is the last response."""
    finishes = [response for response in responses if response.WhichOneof("event") == "finish"]
    assert finishes == responses[-1:]
    assert output.finish_reason is not None
    return responses[-1].finish


FIRST = (Tokens((5,), None),)

# -- before the first token


@pytest.mark.parametrize(
    ("is_local", "mode"), [(True, inference_pb2.MODE_LOCAL), (False, inference_pb2.MODE_DISAGGREGATED)]
)
def test_the_first_response_says_that_the_request_is_taken(
    byte_level: Tokenizer, is_local: bool, mode: inference_pb2.Mode
) -> None:
    """The server's id, where the prompt is computed, and how many were before it."""
    (response,) = _take(_stream(byte_level), Placed(0, is_local=is_local, reason=""))
    assert response.accepted == inference_pb2.Accepted(request_id="minted", mode=mode, queue_position=2)


def test_a_later_attempt_is_told_as_a_migration(byte_level: Tokenizer) -> None:
    """Not accepted again: attempt and reason, and the prompt that is computed again is not told again."""
    output = _stream(byte_level)
    responses = _take(
        output,
        Placed(0, is_local=False, reason=""),
        PromptComputed(4, "prefill-0"),
        Placed(1, is_local=True, reason="PEER_LOST"),
        PromptComputed(6, "decode-1"),
        *FIRST,
    )
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["accepted", "migrated", "delta", "prefill_done"]
    assert responses[1].migrated == inference_pb2.Migrated(attempt=1, reason="PEER_LOST")
    assert responses[3].prefill_done.prefill_worker == "prefill-0"


def test_a_request_is_accepted_once_a_worker_has_been_asked(byte_level: Tokenizer) -> None:
    """The worker of its first attempt may be gone before that: nothing has moved that the client knew of."""
    (response,) = _take(_stream(byte_level), Placed(1, is_local=True, reason="PEER_LOST"))
    assert response.HasField("accepted")


def test_progress_and_the_end_of_the_prefill_are_told_with_lengths(byte_level: Tokenizer) -> None:
    """Tokens computed, of how many, how many cached, and by whom; the first token does not wait for that to be sent."""
    progress, delta, done = _take(
        _stream(byte_level), PromptProgress(3), PromptComputed(4, "prefill-0"), *FIRST
    )
    assert tuple(delta.delta.token_ids) == FIRST[0].token_ids
    assert progress.progress == inference_pb2.Progress(computed_tokens=3, prompt_tokens=7)
    assert done.prefill_done == inference_pb2.PrefillDone(
        prompt_tokens=7, cached_tokens=4, prefill_worker="prefill-0"
    )


def test_log_probabilities_of_the_prompt_are_told_with_its_end(byte_level: Tokenizer) -> None:
    """As they came, and once: a later attempt's are not told again."""
    entries = tuple(generation_pb2.TokenLogprob(token_id=n, logprob=-n) for n in range(1, 7))
    computed = PromptComputed(0, "prefill-0", entries), PromptComputed(0, "decode-0", entries)
    _, done, _ = _take(_stream(byte_level), computed[0], *FIRST, computed[1], *FIRST)
    assert tuple(done.prefill_done.prompt_logprobs) == entries


def test_an_end_without_a_token_does_not_keep_back_that_the_prompt_is_computed(
    byte_level: Tokenizer,
) -> None:
    """As when a message is repeated whose token was seen before."""
    responses = _take(_stream(byte_level), PromptComputed(4, "p"), Tokens((), FinishReason.LENGTH))
    assert [response.WhichOneof("event") for response in responses] == ["prefill_done", "finish"]


# -- tokens


def test_deltas_joined_are_the_output(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    """Every token once, the whole text, and an end with usage and reason."""
    output = _stream(byte_level)
    responses = _take(output, PromptComputed(4, "p"), *_one_by_one(ids, FinishReason.LENGTH))
    assert (_text(responses), _token_ids(responses)) == (TEXT, ids)
    finish = _finish(output, responses)
    assert finish.reason == generation_pb2.FINISH_REASON_LENGTH
    assert finish.WhichOneof("matched") is None
    assert finish.usage == inference_pb2.Usage(prompt_tokens=7, cached_tokens=4, output_tokens=len(ids))


def test_tokens_in_one_event_give_the_same_as_one_by_one(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    """How tokens are bundled on the way does not show in text, tokens or usage."""
    one_by_one = _take(_stream(byte_level), *_one_by_one(ids, FinishReason.LENGTH))
    at_once = _take(_stream(byte_level), Tokens(ids, FinishReason.LENGTH))
    assert _text(at_once) == _text(one_by_one)
    assert _token_ids(at_once) == _token_ids(one_by_one)
    assert at_once[-1].finish == one_by_one[-1].finish


@pytest.mark.parametrize("include_stop", [False, True])
def test_the_end_token_is_counted_and_shown_only_when_asked(
    byte_level: Tokenizer, ids: tuple[int, ...], include_stop: bool
) -> None:
    """An ordinary token that ends the output is no part of the text; it is in the tokens and in the usage."""
    output = _stream(byte_level, include_stop=include_stop)
    responses = _take(output, *_one_by_one(ids, FinishReason.EOS))
    shown = ids if include_stop else ids[:-1]
    assert (_text(responses), _token_ids(responses)) == (byte_level.decode(shown), ids)
    finish = _finish(output, responses)
    assert finish.reason == generation_pb2.FINISH_REASON_EOS
    assert finish.WhichOneof("matched") is None
    assert finish.usage.output_tokens == len(ids)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_is_named(byte_level: Tokenizer, ids: tuple[int, ...], include_stop: bool) -> None:
    """The finish says which token matched; its text is hidden unless it was asked for."""
    output = _stream(byte_level, stop_token_ids=(ids[2],), include_stop=include_stop)
    responses = _take(output, *_one_by_one(ids[:3], FinishReason.STOP))
    assert _text(responses) == byte_level.decode(ids[: 3 if include_stop else 2])
    finish = _finish(output, responses)
    assert finish.reason == generation_pb2.FINISH_REASON_STOP
    assert (finish.WhichOneof("matched"), finish.stop_token_id) == ("stop_token_id", ids[2])


def test_an_end_without_a_new_token_is_an_end_too(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    """When the last token was seen before, in a repeated message, the request still ends, in one Finish."""
    for reason in (FinishReason.EOS, FinishReason.LENGTH, FinishReason.STOP):
        output = _stream(byte_level)
        responses = _take(output, Tokens(ids, None), Tokens((), None), Tokens((), reason))
        assert _text(responses) == TEXT
        assert _finish(output, responses).usage.output_tokens == len(ids)
        assert output.finish_reason is reason


def test_held_back_text_comes_with_the_end(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    """What might have become a stop string and did not is shown when nothing more comes."""
    output = _stream(byte_level, stop=("four score",))
    responses = _take(output, *_one_by_one(ids, FinishReason.LENGTH))
    assert _text(responses[:-2]) == "one two three "
    assert _text(responses) == TEXT


# -- stop strings


@pytest.mark.parametrize("include_stop", [False, True])
@pytest.mark.parametrize("stop", ["two", "o t", " three", "ne two thre"])
def test_a_stop_string_across_tokens_ends_the_output(
    byte_level: Tokenizer, ids: tuple[int, ...], stop: str, include_stop: bool
) -> None:
    """Nothing of it or past it leaks; the finish names it; the tokens up to it count, and no later one."""
    output = _stream(byte_level, stop=("zzz", stop), include_stop=include_stop)
    responses: list[Response] = []
    for event in _one_by_one(ids, FinishReason.LENGTH):
        responses += output.take(event)
        if output.finish_reason is not None:
            break
    before = TEXT[: TEXT.index(stop)]
    assert _text(responses) == (before + stop if include_stop else before)
    finish = _finish(output, responses)
    assert (finish.reason, finish.stop) == (generation_pb2.FINISH_REASON_STOP, stop)
    num_needed = next(n for n in range(len(ids) + 1) if stop in byte_level.decode(ids[:n]))
    assert finish.usage.output_tokens == len(_token_ids(responses)) == num_needed


def test_a_stop_string_in_a_bundle_counts_no_overshoot(byte_level: Tokenizer, ids: tuple[int, ...]) -> None:
    """Tokens behind the match, in the same event, are neither shown nor counted, whatever ended the event."""
    for reason in (None, FinishReason.LENGTH, FinishReason.EOS):
        output = _stream(byte_level, stop=("two",))
        responses = _take(output, Tokens(ids, reason))
        num_needed = next(n for n in range(len(ids) + 1) if "two" in byte_level.decode(ids[:n]))
        assert _text(responses) == "one "
        assert _finish(output, responses).usage.output_tokens == num_needed
        assert output.finish_reason is FinishReason.STOP


def test_a_stop_string_that_the_last_token_completes_wins_over_length(
    byte_level: Tokenizer, ids: tuple[int, ...]
) -> None:
    """Both are true; the more telling reason is given."""
    output = _stream(byte_level, stop=("four",))
    responses = _take(output, *_one_by_one(ids, FinishReason.LENGTH))
    assert _finish(output, responses).stop == "four"
    assert _text(responses) == "one two three "


# -- several candidates


def test_each_candidate_has_its_own_text_stop_string_and_end(
    byte_level: Tokenizer, ids: tuple[int, ...]
) -> None:
    """A stop string in one ends that one; the others go on, and the stream ends with the last of them."""
    output = _stream(byte_level, n=2, stop=("three",))
    events: list[DispatchEvent] = [Placed(0, is_local=True, reason=""), PromptComputed(3, "w")]
    other = byte_level.encode("four")
    events += [Tokens((token_id,), None, (), 1) for token_id in ids]
    responses = _take(output, *events)
    assert output.has_ended(1)
    assert not output.has_ended(0)
    before = output.finish_reason
    later = output.take(Tokens(other, FinishReason.LENGTH, (), 0))
    assert (before, output.finish_reason) == (None, FinishReason.LENGTH)
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds[:3] == ["accepted", "delta", "prefill_done"]
    assert [response.index for response in responses] == [0, 1, 0, *[1] * (len(responses) - 3)]
    assert {response.index for response in later} == {0}
    assert (_text(responses), _text(later)) == ("one two ", "four")
    first, second = responses[-1].finish, later[-1].finish
    assert (first.reason, first.stop) == (generation_pb2.FINISH_REASON_STOP, "three")
    assert second.reason == generation_pb2.FINISH_REASON_LENGTH
    assert (first.usage.prompt_tokens, second.usage.prompt_tokens) == (7, 7)
    assert second.usage.output_tokens == len(other)
    assert output.num_output_tokens == first.usage.output_tokens + len(other)


def test_a_migration_names_the_candidate_that_goes_on(byte_level: Tokenizer) -> None:
    """Each candidate that a later attempt carries on by itself has its own Migrated."""
    output = _stream(byte_level, n=3)
    later = [Placed(number, is_local=True, reason="KV_LOST", candidate=number) for number in (1, 2)]
    responses = _take(output, Placed(0, is_local=True, reason=""), *later)
    assert [(r.WhichOneof("event"), r.index) for r in responses[1:]] == [("migrated", 1), ("migrated", 2)]
