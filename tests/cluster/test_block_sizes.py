"""Tiers whose workers cut their KV into blocks of different sizes: handed over all the same, converted on the way."""

from pathlib import Path

import pytest

from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner
from tests.cluster.support import fake_tokens, random_prompts, running_cluster
from tests.engine.whole import whole_reference
from tests.tiny_model import EOS_ID, VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
@pytest.mark.parametrize("kv_transport", ["auto", "grpc"])
async def test_tokens_are_the_oracle_s(
    tmp_path: Path, tiny_tokenizer_dir: Path, sizes: tuple[int, int], kv_transport: str
) -> None:
    """Every prompt is handed over, in the owner's blocks; what the receiver has in whole ones of those does not travel again."""
    prefill, decode = ({"block_size": size, "num_blocks": 10240 // size} for size in sizes)
    async with running_cluster(
        tmp_path,
        tiny_tokenizer_dir,
        sections={"prefill": prefill, "decode": decode},
        runner="fake",
        disaggregate="always",
        kv_transport=kv_transport,
    ) as cluster:
        num_moved = 0
        for prompt in random_prompts(seed=3, count=12, longest=200, vocab_size=VOCAB_SIZE):
            answer = await cluster.client.generate_text(prompt, max_tokens=20, temperature=0)
            assert answer.token_ids == fake_tokens(prompt, 20, VOCAB_SIZE, EOS_ID)
            num_moved += answer.timeline.kv_blocks
            again = await cluster.client.generate_text((*prompt, 5), max_tokens=20, temperature=0)
            assert again.token_ids == fake_tokens((*prompt, 5), 20, VOCAB_SIZE, EOS_ID)
            num_held = len(prompt) // sizes[1] * sizes[1] // sizes[0]
            assert again.timeline.kv_blocks == -(-(len(prompt) + 1) // sizes[0]) - num_held
            assert again.timeline.attempts == 1
        assert num_moved > 0


@pytest.mark.parametrize("sizes", [(8, 16), (16, 8)])
async def test_a_real_model_s_keys_values_and_scales_are_converted(
    tmp_path: Path, tiny_model_dir: Path, sizes: tuple[int, int]
) -> None:
    """In 8 bits, layer by layer: what one tier computed goes on in the other one as if nothing had moved."""
    loaded = load_model(tiny_model_dir, "float32", 16, kv_dtype="int8")
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks=8)
    prompts = random_prompts(seed=3, count=4, longest=80, vocab_size=VOCAB_SIZE)
    prefill, decode = ({"block_size": size} for size in sizes)
    async with running_cluster(
        tmp_path,
        tiny_model_dir,
        sections={"prefill": prefill, "decode": decode},
        dtype="float32",
        kv_dtype="int8",
        disaggregate="always",
    ) as cluster:
        for prompt in prompts:
            answer = await cluster.client.generate_text(prompt, max_tokens=12, temperature=0, ignore_eos=True)
            assert answer.token_ids == whole_reference(runner, loaded.layout, prompt, 12).output_ids
            assert answer.timeline.kv_blocks > 0
