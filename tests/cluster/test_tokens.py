"""The tokens that come out of a cluster are the oracle's, whatever path they took."""

import asyncio
from pathlib import Path

import pytest

from paceline.client import Completion, GenerateOptions
from paceline.core.request import SamplingParams
from paceline.engine.fake import fake_next_token, fake_prompt_logprobs
from paceline.runtime.wire_internal import logprob_from_proto
from tests.cluster.support import Cluster, events_of, fake_tokens, random_prompts, running_cluster
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = pytest.mark.asyncio(loop_scope="session")

GREEDY_64: GenerateOptions = {"max_tokens": 64, "temperature": 0.0}


async def complete_all(cluster: Cluster, prompts: list[tuple[int, ...]], at_once: int) -> list[Completion]:
    """The answers to the prompts, `at_once` of them at a time."""
    slots = asyncio.Semaphore(at_once)

    async def complete(prompt: tuple[int, ...]) -> Completion:
        """One answer, when there is a slot for it."""
        async with slots:
            return await cluster.client.generate_text(prompt, max_tokens=64, temperature=0.0)

    return list(await asyncio.gather(*map(complete, prompts)))


@pytest.mark.parametrize("at_once", [1, 8, 32])
async def test_handed_over_tokens_equal_the_oracle(idle_fake_cluster: Cluster, at_once: int) -> None:
    """Every answer is the oracle's, token for token, and every prompt was really handed over."""
    prompts = random_prompts(seed=at_once, count=40, longest=300, vocab_size=VOCAB_SIZE)
    answers = await complete_all(idle_fake_cluster, prompts, at_once)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_tokens(prompt, 64, VOCAB_SIZE, EOS_ID)
        assert answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.output_tokens == len(answer.token_ids)
        assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-0")
    assert sum(answer.timeline.kv_blocks for answer in answers) > 0


async def test_a_stream_is_numbered_and_ordered(idle_fake_cluster: Cluster) -> None:
    """A stream begins with Accepted, tells of the prompt behind its first token, and ends with the one Finish."""
    prompt = random_prompts(seed=5, count=1, longest=200, vocab_size=VOCAB_SIZE)[0]
    responses = [
        r
        async for r in idle_fake_cluster.client.generate(prompt, max_tokens=5, temperature=0, ignore_eos=True)
    ]
    # How many tokens come together is chance.
    kinds = dict.fromkeys(kind for kind in events_of(responses) if kind != "progress")
    assert list(kinds) == ["accepted", "delta", "prefill_done", "finish"]
    assert sum(len(response.delta.token_ids) for response in responses) == 5
    assert [response.seq for response in responses] == list(range(len(responses)))


async def test_a_repeated_prompt_hits_the_cache(idle_fake_cluster: Cluster) -> None:
    """The second request with a long prefix takes it from the cache and moves only what decode lacks; a first one misses."""
    prompt = tuple((7 * i) % VOCAB_SIZE for i in range(400))
    first = await idle_fake_cluster.client.generate_text(prompt, **GREEDY_64)
    second = await idle_fake_cluster.client.generate_text((*prompt, 1, 2, 3), **GREEDY_64)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 400
    assert first.timeline.kv_blocks == 25
    assert second.timeline.kv_blocks == 1
    assert second.token_ids == fake_tokens((*prompt, 1, 2, 3), 64, VOCAB_SIZE, EOS_ID)


async def test_bypass_neither_reads_nor_fills_the_cache(idle_fake_cluster: Cluster) -> None:
    """A request that bypasses the cache hits nothing and leaves nothing; one that does not hits as before."""
    prompt = tuple((11 * i + 3) % VOCAB_SIZE for i in range(160))
    bypassing = await idle_fake_cluster.client.generate_text(
        prompt, bypass_cache=True, max_tokens=64, temperature=0
    )
    filling = await idle_fake_cluster.client.generate_text(prompt, **GREEDY_64)
    hitting = await idle_fake_cluster.client.generate_text(prompt, **GREEDY_64)
    again = await idle_fake_cluster.client.generate_text(
        prompt, bypass_cache=True, max_tokens=64, temperature=0
    )
    cached = [answer.cached_tokens for answer in (bypassing, filling, hitting, again)]
    assert cached == [0, 0, 144, 0]
    assert len({answer.token_ids for answer in (bypassing, filling, hitting, again)}) == 1


async def test_a_seed_decides_the_tokens(idle_fake_cluster: Cluster) -> None:
    """The same seed gives the same tokens, another seed others, and no seed at all a fresh one each time."""
    complete = idle_fake_cluster.client.generate_text
    prompt = (5, 6, 7)
    same = {(await complete(prompt, seed=1, max_tokens=20, ignore_eos=True)).token_ids for _ in range(2)}
    others = {(await complete(prompt, max_tokens=20, ignore_eos=True)).token_ids for _ in range(3)}
    assert len(same) == 1
    assert len(others) == 3
    assert not same & others


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_first_token_may_be_the_last(idle_fake_cluster: Cluster, max_tokens: int) -> None:
    """With max_tokens 1 the prefill's token is all, and decode adds nothing; with 2 it adds one."""
    prompt = (40, 41, 42)
    answer = await idle_fake_cluster.client.generate_text(
        prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True
    )
    assert answer.token_ids == fake_tokens(prompt, max_tokens, VOCAB_SIZE, None)
    assert answer.finish_reason == "length"


@pytest.mark.thorough
async def test_preempted_sequences_give_the_same_tokens(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """Under a pool too small for all, sequences are preempted, computed again, and still give the oracle's tokens."""
    small = {"decode": {"num_blocks": 16}}
    async with running_cluster(tmp_path, tiny_tokenizer_dir, sections=small, runner="fake") as cluster:
        prompts = random_prompts(seed=3, count=12, longest=60, vocab_size=VOCAB_SIZE)
        answers = await asyncio.gather(
            *(
                cluster.client.generate_text(p, max_tokens=100, temperature=0, ignore_eos=True)
                for p in prompts
            )
        )
        assert (await cluster.load("decode-0")).num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_tokens(prompt, 100, VOCAB_SIZE, None)
    assert sum(answer.timeline.preemptions for answer in answers) > 0


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "topology"), [("never", "1P1D"), ("auto", "0P1D")])
async def test_local_tokens_equal_the_oracle(
    tmp_path: Path, tiny_tokenizer_dir: Path, mode: str, topology: str
) -> None:
    """Without a hand-over the decode worker computes the prompt itself, and the tokens are the same."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate=mode, topology=topology
    ) as cluster:
        prompts = random_prompts(seed=9, count=16, longest=200, vocab_size=VOCAB_SIZE)
        answers = await complete_all(cluster, prompts, at_once=8)
        assert (await cluster.load("decode-0")).num_blocks_pulled == 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_tokens(prompt, 64, VOCAB_SIZE, EOS_ID)
        assert answer.prefill_worker == "decode-0"


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["always", "never"])
async def test_prompts_are_told_whole_in_either_mode(
    tmp_path: Path, tiny_tokenizer_dir: Path, mode: str
) -> None:
    """Every prompt token but the first has the oracle's entry, once, whoever computes the prompt in whatever chunks."""
    chunks = {"prefill": {"max_num_batched_tokens": 48}, "decode": {"max_num_batched_tokens": 48}}
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, sections=chunks, runner="fake", disaggregate=mode
    ) as cluster:
        prompts = random_prompts(seed=21, count=12, longest=300, vocab_size=VOCAB_SIZE)
        answers = await asyncio.gather(
            *(
                cluster.client.generate_text(
                    prompt, max_tokens=20, temperature=0, num_top_logprobs=3, prompt_logprobs=True
                )
                for prompt in prompts
            )
        )
        hitting = await cluster.client.generate_text(prompts[0], max_tokens=20, temperature=0)
    for prompt, answer in zip(prompts, answers, strict=True):
        told = tuple(map(logprob_from_proto, answer.prompt_logprobs))
        assert told == fake_prompt_logprobs(prompt, 3, VOCAB_SIZE)
        assert answer.token_ids == fake_tokens(prompt, 20, VOCAB_SIZE, EOS_ID)
        assert answer.cached_tokens == 0
        assert answer.prefill_worker == ("prefill-0" if mode == "always" else "decode-0")
    assert hitting.cached_tokens == (len(prompts[0]) - 1) // 16 * 16, "the prompts above filled no cache"
    assert hitting.prompt_logprobs == ()


@pytest.mark.thorough
async def test_several_workers_share_the_work(tmp_path: Path, tiny_tokenizer_dir: Path) -> None:
    """With two workers in each tier all four are used, and the tokens are the same."""
    async with running_cluster(
        tmp_path, tiny_tokenizer_dir, runner="fake", disaggregate="always", topology="2P2D"
    ) as cluster:
        prompts = random_prompts(seed=17, count=40, longest=300, vocab_size=VOCAB_SIZE)
        answers = await complete_all(cluster, prompts, at_once=16)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == fake_tokens(prompt, 64, VOCAB_SIZE, EOS_ID)
    assert {answer.prefill_worker for answer in answers} == {"prefill-0", "prefill-1"}
    assert {answer.decode_worker for answer in answers} == {"decode-0", "decode-1"}


async def test_sampling_options_reach_the_sampler(idle_fake_cluster: Cluster) -> None:
    """Over the whole way every option counts: the fake model's tokens depend on each, and are the oracle's."""
    bias = {3: 1.0, 1: -2.0}
    answer = await idle_fake_cluster.client.generate_text(
        (70, 71, 72),
        max_tokens=12,
        min_tokens=12,
        temperature=0,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=bias,
        num_top_logprobs=1,
    )
    params = SamplingParams(
        temperature=0,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias=tuple(sorted(bias.items())),
    )
    expected: list[int] = []
    while len(expected) < 12:
        expected.append(fake_next_token((70, 71, 72, *expected), params, VOCAB_SIZE, (EOS_ID,)))
    assert list(answer.token_ids) == expected
    assert [logprob.token_id for logprob in answer.logprobs] == expected
    assert all([top.token_id for top in logprob.top] == [logprob.token_id] for logprob in answer.logprobs)
