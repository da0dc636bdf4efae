"""Several candidates of one prompt through a whole cluster: one prompt, one hand-over, and each candidate's own output."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from paceline.client import GenerateOptions
from paceline.core.request import SamplingParams
from tests.cluster.support import Cluster, events_of, fake_tokens, running_cluster
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

PROMPT = tuple((13 * i + 5) % VOCAB_SIZE for i in range(150))
SEEDED: GenerateOptions = {"n": 4, "seed": 9, "max_tokens": 40}
WHOLE: GenerateOptions = {**SEEDED, "ignore_eos": True}
SHORT: GenerateOptions = {"seed": 9, "max_tokens": 5, "bypass_cache": True}
SHORT_FAMILY: GenerateOptions = {**SHORT, "n": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def local_cluster(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer_dir: Path
) -> AsyncIterator[Cluster]:
    """One whose decode worker computes all prompts."""
    tmp_dir = tmp_path_factory.mktemp("local-cluster")
    async with running_cluster(tmp_dir, tiny_tokenizer_dir, runner="fake", disaggregate="never") as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="session", params=["disaggregated", "local"])
async def cluster(
    request: pytest.FixtureRequest, idle_fake_cluster: Cluster, local_cluster: Cluster
) -> AsyncIterator[Cluster]:
    """Either mode; nothing is left in any pool."""
    wanted = local_cluster if request.param == "local" else idle_fake_cluster
    yield wanted
    await wanted.until_idle()


def _expected(candidate: int, num_tokens: int = 40, eos: int | None = EOS_ID) -> tuple[int, ...]:
    sampling = SamplingParams(seed=9)
    return fake_tokens(PROMPT, num_tokens, VOCAB_SIZE, eos, sampling=sampling, candidate=candidate)


async def test_every_candidate_is_the_oracle_s(cluster: Cluster) -> None:
    """Token for token, in both modes, each with its own usage; and the first one is what n = 1 gives."""
    answers = await cluster.client.generate_texts(PROMPT, **SEEDED)
    assert [answer.token_ids for answer in answers] == [_expected(candidate) for candidate in range(4)]
    assert len({answer.token_ids for answer in answers}) == 4
    for answer in answers:
        assert answer.usage.prompt_tokens == len(PROMPT)
        assert answer.usage.output_tokens == len(answer.token_ids)
    alone = await cluster.client.generate_text(PROMPT, seed=9, max_tokens=40)
    assert alone.token_ids == answers[0].token_ids
    assert alone.text == answers[0].text


async def test_a_stream_of_candidates_is_numbered_without_gaps(cluster: Cluster) -> None:
    """What concerns the whole request is said once, each candidate ends once, and the stream ends with the last end."""
    events = [event async for event in cluster.client.generate(PROMPT, **SEEDED)]
    kinds = events_of(events)
    assert [event.seq for event in events] == list(range(len(events)))
    assert (kinds.count("accepted"), kinds.count("prefill_done")) == (1, 1)
    ends = [event.index for event in events if event.HasField("finish")]
    assert sorted(ends) == [0, 1, 2, 3]
    assert kinds[-1] == "finish"
    for index in range(4):
        own = [event.WhichOneof("event") for event in events if event.index == index]
        assert own[-1] == "finish"


async def test_the_prompt_is_handed_over_once(idle_fake_cluster: Cluster) -> None:
    """Four candidates move as many bytes as one."""
    complete = idle_fake_cluster.client.generate_texts
    (one,), four = await complete(PROMPT, **SHORT), await complete(PROMPT, **SHORT_FAMILY)
    assert one.timeline.kv_bytes == four[3].timeline.kv_bytes > 0
    assert one.timeline.kv_blocks == four[3].timeline.kv_blocks == 10


async def test_a_stop_string_ends_its_candidate_alone(cluster: Cluster) -> None:
    """Each text ends before the string's first place in it, if it has one; the others are whole."""
    whole = await cluster.client.generate_texts(PROMPT, **WHOLE)
    stop = whole[1].text[20:24]
    stopping: GenerateOptions = {**WHOLE, "stop": [stop]}
    answers = await cluster.client.generate_texts(PROMPT, **stopping)
    for before, answer in zip(whole, answers, strict=True):
        assert answer.text == before.text.split(stop)[0]
        assert answer.finish_reason == ("stop" if stop in before.text else "length")
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_first_tokens_may_be_the_last(cluster: Cluster, max_tokens: int) -> None:
    """With max_tokens 1 decode adds nothing to any candidate; with 2 one token to each."""
    answers = await cluster.client.generate_texts(
        PROMPT, n=3, seed=9, max_tokens=max_tokens, ignore_eos=True, num_top_logprobs=1
    )
    assert [answer.token_ids for answer in answers] == [
        _expected(candidate, max_tokens, None) for candidate in range(3)
    ]
    assert [len(answer.logprobs) for answer in answers] == [max_tokens] * 3


async def test_a_client_that_leaves_frees_every_candidate(cluster: Cluster) -> None:
    """In the middle of all outputs: the pools come back to where they were."""
    events = cluster.client.generate(PROMPT, n=16, seed=9, max_tokens=1500, ignore_eos=True)
    seen = set()
    async with aclosing(events):
        async for event in events:
            seen.add(event.index)
            if len(seen) == 16:
                break
    await cluster.until_idle()


async def test_many_families_share_a_small_pool(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Candidates are preempted and computed again, more of them than seats, and all tokens are the oracle's."""
    small = {"decode": {"num_blocks": 24, "max_num_seqs": 6}}
    async with running_cluster(tmp_path, tiny_tokenizer_dir, sections=small, runner="fake") as cluster:
        prompts = [tuple((17 * i + n) % VOCAB_SIZE for i in range(20 + n)) for n in range(6)]
        answers = await asyncio.gather(
            *(
                cluster.client.generate_texts(prompt, n=8, seed=9, max_tokens=60, ignore_eos=True)
                for prompt in prompts
            )
        )
        assert (await cluster.load("decode-0")).num_preemptions > 0
    for prompt, family in zip(prompts, answers, strict=True):
        for candidate, answer in enumerate(family):
            assert answer.token_ids == fake_tokens(
                prompt, 60, VOCAB_SIZE, None, sampling=SamplingParams(seed=9), candidate=candidate
            )
