"""Makes a loaded model exact, and shows on this machine that it is."""

import torch
import xxhash
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import BlockId, KVLayout
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.exact.attention import EXACT_NAME
from paceline.engine.exact.census import require_trusted
from paceline.engine.exact.modules import replace_modules
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput

_Part = tuple[int, int, int]  # which prompt, and its tokens [from, to)


def make_exact(model: PreTrainedModel) -> None:
    """From now on what the model computes for a token depends on its context only, in inference mode and on one thread.

    Raises UnsupportedModelError when that cannot be promised.
    """
    if getattr(model.config.get_text_config(), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")
    replace_modules(model)
    require_trusted(model)
    model.set_attn_implementation(EXACT_NAME)


@torch.inference_mode()
def require_exact(runner: ModelRunner, vocab_size: int, layout: KVLayout) -> str:
    """Computes a prompt in several ways, and raises UnsupportedModelError unless all give the same bits.

    Returns a digest of these bits. Workers with the same digest compute alike, whatever their processors, libraries
    and numbers of threads.
    """
    size, end = layout.block_size, layout.block_size + 3
    ways: list[list[list[_Part]]] = [
        [[(0, 0, end)]],
        [[(0, position, position + 1)] for position in range(end)],
        [[(1, 0, end)], [(1, end - 1, end), (0, 0, size)], [(1, end - 1, end), (0, size, end)]],
        [[(1, 0, size), (0, 0, end - 1)], [(0, end - 1, end), (1, size, end)]],
    ]
    prompts = [[(7 * i + start) % vocab_size for i in range(end)] for start in (1, 5)]
    digests = {_digest_of(runner, prompts, layout, way) for way in ways}
    if len(digests) > 1:
        raise UnsupportedModelError(
            "the model gives a prompt other bits in chunks or beside another prompt; exact mode cannot serve it"
        )
    return f"exact:{digests.pop()}"


def _digest_of(
    runner: ModelRunner, prompts: list[list[int]], layout: KVLayout, steps: list[list[_Part]]
) -> str:
    """Of the first prompt's last logits, and of the KV of its first block."""
    logits = torch.empty(0)
    for step in steps:
        scheduled = tuple(_scheduled(prompts, part, layout) for part in step)
        batch = build_forward_batch(SchedulerOutput(scheduled, ()), layout.block_size)
        row = [prompt for prompt, _, _ in step].index(0) if any(part[0] == 0 for part in step) else 0
        logits = runner.forward(batch)[row]
    digest = xxhash.xxh3_128(_bytes_of(logits))
    digest.update(runner.memory.read(BlockId(0))[: layout.used_bytes(0)])
    return digest.hexdigest()


def _scheduled(prompts: list[list[int]], part: _Part, layout: KVLayout) -> ScheduledSequence:
    prompt, start, end = part
    return ScheduledSequence(
        sequence_id=SequenceId(RequestId("probe"), prompt),
        token_ids=tuple(prompts[prompt][start:end]),
        start=start,
        block_tables=side_by_side(prompt, len(prompts[0]), layout),
        samples=(SampleTask(SamplingParams()),),
    )


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.float().numpy().tobytes()
