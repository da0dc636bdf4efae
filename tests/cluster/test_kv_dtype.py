"""A hand-over with keys and values in 8 bits: half the bytes, and the tokens of one process."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.engine.model_loader import load_model
from paceline.engine.model_runner import ModelRunner
from tests.cluster.support import random_prompts, running_cluster
from tests.engine.whole import whole_reference
from tests.tiny_model import VOCAB_SIZE

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.thorough]

BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 12


async def test_a_prompt_is_handed_over_in_eight_bits(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Prompts computed in chunks move as int8 blocks with their scales, and go on as if nothing had moved."""
    loaded = load_model(tiny_model_dir, "float32", BLOCK_SIZE, kv_dtype="int8")
    runner = ModelRunner(loaded.model, loaded.layout, num_blocks=8)
    prompts = random_prompts(seed=3, count=4, longest=80, vocab_size=VOCAB_SIZE)
    async with running_cluster(
        tmp_path,
        tiny_model_dir,
        sections={"prefill": {"max_num_batched_tokens": 24}},
        dtype="float32",
        kv_dtype="int8",
        disaggregate="always",
    ) as cluster:
        answers = [
            await cluster.client.generate_text(
                prompt, max_tokens=NUM_OUTPUT_TOKENS, temperature=0, ignore_eos=True
            )
            for prompt in prompts
        ]
        await cluster.until_idle()
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = whole_reference(runner, loaded.layout, prompt, NUM_OUTPUT_TOKENS)
        assert answer.token_ids == expected.output_ids
        assert answer.timeline.kv_bytes == answer.timeline.kv_blocks * loaded.layout.block_bytes > 0
    # Heads of 16 elements: 18 bytes beside 32. With 64 it would be 66 beside 128.
    assert loaded.layout.block_bytes / replace(loaded.layout, dtype="bfloat16").block_bytes == 18 / 32
