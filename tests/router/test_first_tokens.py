"""Answers that end with their first token, or with the second one, on whole workers: all that a client is told is the oracle's."""

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.core.request import FinishReason, SamplingParams, SequenceSpec
from paceline.runtime.wire_internal import finish_reason_from_proto
from paceline.v1 import generation_pb2, inference_pb2
from router.tokenizer import Tokenizer
from tests.engine.harness import oracle
from tests.factories import make_spec
from tests.router.whole import Call, WholeRouter, whole_router
from tests.worker.bench import EOS, VOCAB_SIZE

SEEDED = SamplingParams(seed=4)
PROMPT = tuple(range(20, 38))


@pytest.fixture(params=["always", "never"])
async def router(
    request: pytest.FixtureRequest, tiny_tokenizer_dir: Path, byte_level: Tokenizer
) -> AsyncIterator[WholeRouter]:
    """Every prompt is handed over, or none."""
    async with whole_router(tiny_tokenizer_dir, byte_level, disaggregate=request.param) as router:
        yield router


@dataclass(frozen=True, slots=True)
class Heard:
    """What a client hears of one candidate."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason
    stop: str
    usage: tuple[int, int]
    num_logprobs: int


async def heard(router: WholeRouter, spec: SequenceSpec, stop: Sequence[str] = ()) -> list[Heard]:
    """Of each candidate of a request that becomes this sequence."""
    call = Call()
    await router.generate(_request(spec, stop), call)
    await router.until_idle()
    return [_heard(call.responses, candidate) for candidate in spec.candidates]


def _request(spec: SequenceSpec, stop: Sequence[str]) -> bytes:
    return inference_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=spec.prompt_ids),
        n=len(spec.candidates),
        sampling=generation_pb2.SamplingParams(seed=spec.sampling.seed, temperature=1),
        stopping=generation_pb2.StopConditions(
            max_tokens=spec.max_tokens,
            ignore_eos=spec.ignore_eos,
            stop_token_ids=spec.stop_token_ids,
            stop=stop,
        ),
        logprobs=generation_pb2.LogprobOptions(num_top=1),
    ).SerializeToString()


def _heard(responses: Sequence[inference_pb2.GenerateResponse], candidate: int) -> Heard:
    own = [response for response in responses if response.index == candidate]
    deltas = [response.delta for response in own if response.HasField("delta")]
    (finish,) = (response.finish for response in own if response.HasField("finish"))
    assert own[-1].HasField("finish")
    logprobs = [each for delta in deltas for each in delta.logprobs]
    token_ids = tuple(token for delta in deltas for token in delta.token_ids)
    assert [each.token_id for each in logprobs] == list(token_ids)
    reason = finish_reason_from_proto(finish.reason)
    assert reason is not None
    usage = (finish.usage.prompt_tokens, finish.usage.output_tokens)
    return Heard(token_ids, "".join(d.text for d in deltas), reason, finish.stop, usage, len(logprobs))


def spec_of(prompt_ids: tuple[int, ...] = PROMPT, *, num_candidates: int = 1, **options: Any) -> SequenceSpec:
    """A seeded sequence."""
    candidates = tuple(range(num_candidates))
    return make_spec(prompt_ids=prompt_ids, sampling=SEEDED, candidates=candidates, **options)


def said(spec: SequenceSpec, candidate: int = 0) -> tuple[tuple[int, ...], FinishReason]:
    """The oracle's tokens and end."""
    token_ids, reason = oracle(spec, vocab_size=VOCAB_SIZE, eos=EOS, candidate=candidate)
    return tuple(token_ids), reason


@pytest.mark.parametrize("num_candidates", [1, 3])
@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_so_many_tokens_and_not_one_more(
    router: WholeRouter, byte_level: Tokenizer, max_tokens: int, num_candidates: int
) -> None:
    """Tokens, text, end, usage and log probabilities of each candidate."""
    spec = spec_of(num_candidates=num_candidates, max_tokens=max_tokens, ignore_eos=True)
    for candidate, found in enumerate(await heard(router, spec)):
        token_ids, reason = said(spec, candidate)
        usage = (len(PROMPT), max_tokens)
        assert found == Heard(token_ids, byte_level.decode(token_ids), reason, "", usage, max_tokens)
        assert reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", [0, 1])
async def test_the_end_token_may_come_first(router: WholeRouter, byte_level: Tokenizer, place: int) -> None:
    """It is told, counted, and no text; nothing comes after it."""
    spec = next(
        spec
        for spec in _specs(max_tokens=5)
        if said(spec)[1] is FinishReason.EOS and len(said(spec)[0]) == place + 1
    )
    token_ids, reason = said(spec)
    (found,) = await heard(router, spec)
    usage = (len(spec.prompt_ids), place + 1)
    assert found == Heard(token_ids, byte_level.decode(token_ids), reason, "", usage, place + 1)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_stop_token_may_come_first(router: WholeRouter, byte_level: Tokenizer, place: int) -> None:
    """The same of a token that the caller has named."""
    whole, _ = said(spec_of(max_tokens=5, ignore_eos=True))
    assert whole[0] != whole[1]
    spec = spec_of(max_tokens=5, ignore_eos=True, stop_token_ids=(whole[place],))
    (found,) = await heard(router, spec)
    shown, usage = whole[: place + 1], (len(PROMPT), place + 1)
    text = byte_level.decode(whole[:place])
    assert found == Heard(shown, text, FinishReason.STOP, "", usage, place + 1)


@pytest.mark.parametrize("place", [0, 1])
async def test_a_stop_string_may_come_first(router: WholeRouter, byte_level: Tokenizer, place: int) -> None:
    """With the first token, or with the second one; what workers have computed beyond it is neither shown nor counted."""
    spec, stop = next(
        (spec, stop)
        for spec in _specs(max_tokens=30, ignore_eos=True)
        if (stop := _own_text(byte_level, said(spec)[0], place))
    )
    (found,) = await heard(router, spec, [stop])
    shown, usage = said(spec)[0][: place + 1], (len(spec.prompt_ids), place + 1)
    text = byte_level.decode(said(spec)[0][:place])
    assert found == Heard(shown, text, FinishReason.STOP, stop, usage, place + 1)


def _own_text(tokenizer: Tokenizer, token_ids: Sequence[int], place: int) -> str:
    """What one token adds, if that is whole characters that were not there before."""
    before, after = tokenizer.decode(token_ids[:place]), tokenizer.decode(token_ids[: place + 1])
    own = after[len(before) :]
    return own if "\ufffd" not in after and own.strip() and own not in before else ""


def _specs(**options: Any) -> Iterator[SequenceSpec]:
    """Sequences enough for any kind of beginning."""
    for number in range(20_000):
        yield spec_of((number % VOCAB_SIZE, number // VOCAB_SIZE, *range(12)), **options)
