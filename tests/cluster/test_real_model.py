"""The default model through the whole cluster, against transformers on the same weights."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.client import Completion
from paceline.launcher.models import DEFAULT_MODEL, resolve_model
from tests.cluster.support import Cluster, running_cluster

# The oracle alone takes two minutes, and several on a machine that does other things too.
pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1200)]

NUM_NEW_TOKENS = 64
# Real text to cut prompts from.
TEXT_FILE = Path(__file__).parents[2] / "LICENSE"
PROMPT_LENGTHS = (5, 8, 12, 16, 17, 24, 31, 32, 33, 48, 64, 100, 128, 200, 256, 400, 511, 777, 1024, 1500)
# The slow tier takes all of them. On a processor without bfloat16 all 20 take seven minutes.
IS_SLOW_TIER = os.environ.get("PACELINE_TEST_TIER") == "slow"
SOME_LENGTHS = PROMPT_LENGTHS[1::3]
# Where the two best logits are closer than this, float32 sums in another order may choose either.
TIE = 1e-4
# What float32 sums in another order may do to a log probability.
DRIFT = 1e-3


@dataclass(frozen=True)
class Oracle:
    """What transformers says after a prompt, and by how much each token won."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """The default model's directory; fetched and converted if need be."""
    return resolve_model(DEFAULT_MODEL.name, print)


@pytest.fixture(scope="module")
def oracles(model_dir: Path) -> list[Oracle]:
    """Greedy answers of transformers.generate in float32, one prompt at a time, on all cores: the cluster is idle."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        return _ask_transformers(model_dir)
    finally:
        torch.set_num_threads(num_threads)


def _ask_transformers(model_dir: Path) -> list[Oracle]:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    text_ids = tokenizer.encode(TEXT_FILE.read_text())
    # Each prompt begins somewhere else, so that no two share a prefix.
    lengths = PROMPT_LENGTHS if IS_SLOW_TIER else SOME_LENGTHS
    prompts = [tuple(text_ids[7 * i : 7 * i + length]) for i, length in enumerate(lengths)]
    return [_oracle(model, prompt) for prompt in prompts]


def _oracle(model: torch.nn.Module, prompt_ids: tuple[int, ...]) -> Oracle:
    output = model.generate(  # type: ignore[operator] # transformers adds it at run time
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_NEW_TOKENS,
        return_dict_in_generate=True,
        output_logits=True,
    )
    best_two = torch.cat(output.logits).topk(2).values
    token_ids = tuple(output.sequences[0, len(prompt_ids) :].tolist())
    return Oracle(prompt_ids, token_ids, tuple((best_two[:, 0] - best_two[:, 1]).tolist()))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> AsyncIterator[Cluster]:
    """One prefill and one decode worker in float32; every prompt is handed over."""
    sizes = {"prefill": {"num_blocks": 1400}, "decode": {"num_blocks": 1400}}
    async with running_cluster(
        tmp_path_factory.mktemp("real"), model_dir, sections=sizes, dtype="float32", disaggregate="always"
    ) as cluster:
        yield cluster


async def answer_all(cluster: Cluster, oracles: list[Oracle], at_once: int) -> list[Completion]:
    """The cluster's greedy answers, `at_once` at a time, each prompt computed and handed over as a whole."""
    slots = asyncio.Semaphore(at_once)

    async def answer(oracle: Oracle) -> Completion:
        """One answer, when there is a slot for it."""
        async with slots:
            return await cluster.client.generate_text(
                oracle.prompt_ids, max_tokens=NUM_NEW_TOKENS, temperature=0, bypass_cache=True
            )

    return list(await asyncio.gather(*map(answer, oracles)))


def require_same(oracle: Oracle, answer: Completion) -> None:
    """Asserts equal tokens; after a tie of the oracle's two best, which is printed, both ways are right."""
    pairs = zip(oracle.token_ids, answer.token_ids, strict=False)
    first = next((i for i, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if first is None:
        assert answer.token_ids == oracle.token_ids
        return
    print(  # noqa: T201 - whoever reads the test's output wants to know
        f"prompt of {len(oracle.prompt_ids)}: token {first} differs, margin {oracle.margins[first]:.1e}"
    )
    assert oracle.margins[first] < TIE


@pytest.mark.parametrize("at_once", [8, 1])
async def test_greedy_output_equals_transformers(
    cluster: Cluster, oracles: list[Oracle], at_once: int
) -> None:
    """Prompts of up to 1,500 tokens, alone and 8 at a time: token for token what transformers.generate gives."""
    answers = await answer_all(cluster, oracles, at_once)
    for oracle, answer in zip(oracles, answers, strict=True):
        require_same(oracle, answer)
        assert (answer.prefill_worker, answer.decode_worker) == ("prefill-0", "decode-0")
        assert answer.timeline.kv_blocks == -(-len(oracle.prompt_ids) // 16), "the hand-over did not happen"
    num_blocks_pulled = (await cluster.load("decode-0")).num_blocks_pulled
    assert num_blocks_pulled >= sum(answer.timeline.kv_blocks for answer in answers) > 0


async def test_a_long_prefix_is_computed_once(cluster: Cluster) -> None:
    """The second request with a prefix of 1,000 tokens takes at least 900 of them from the cache; the first takes none."""
    prefix = tuple(100 + (i * i) % 20_000 for i in range(1000))
    first = await cluster.client.generate_text((*prefix, 11, 12), max_tokens=4, temperature=0)
    second = await cluster.client.generate_text((*prefix, 21, 22), max_tokens=4, temperature=0)
    assert first.cached_tokens == 0
    assert second.cached_tokens >= 900
    assert first.timeline.kv_blocks > second.timeline.kv_blocks > 0


async def test_log_probabilities_of_a_prompt_equal_those_of_transformers(
    cluster: Cluster, model_dir: Path
) -> None:
    """A prompt of more than one chunk, handed over: each entry is that of one forward pass over the whole prompt."""
    prompt_ids, plain = _plain_logprobs(model_dir, num_tokens=700)
    answer = await cluster.client.generate_text(
        prompt_ids, max_tokens=4, temperature=0, num_top_logprobs=2, prompt_logprobs=True
    )
    assert [entry.token_id for entry in answer.prompt_logprobs] == list(prompt_ids[1:])
    ours = torch.tensor([entry.logprob for entry in answer.prompt_logprobs])
    best = torch.tensor([[top.logprob for top in entry.top] for entry in answer.prompt_logprobs])
    torch.testing.assert_close(
        ours, plain.gather(-1, torch.tensor(prompt_ids[1:])[:, None])[:, 0], atol=DRIFT, rtol=0
    )
    torch.testing.assert_close(best, plain.topk(2).values, atol=DRIFT, rtol=0)
    assert answer.timeline.kv_blocks > 0


def _plain_logprobs(model_dir: Path, num_tokens: int) -> tuple[tuple[int, ...], torch.Tensor]:
    """The beginning of the text, and the log probabilities of what follows each of its tokens but the last."""
    token_ids = AutoTokenizer.from_pretrained(model_dir).encode(TEXT_FILE.read_text())[:num_tokens]
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids]), use_cache=False).logits[0, :-1]
    return tuple(token_ids), logits.log_softmax(-1)


async def test_it_knows_the_capital_of_france(cluster: Cluster) -> None:
    """A question through the chat template gets a sensible answer that ends by itself."""
    question = [{"role": "user", "content": "What is the capital of France?"}]
    answer = await cluster.client.generate_text(question, temperature=0)
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "eos"
