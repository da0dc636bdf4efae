"""What a model runner says when nothing is cut, cached or batched: the reference for paths with another type of KV."""

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.kv_layout import KVLayout
from paceline.engine.conformance.reference import Reference
from paceline.engine.forward_batch import build_forward_batch
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from tests.factories import GREEDY, make_id


@torch.inference_mode()
def whole_reference(
    runner: ModelRunner, layout: KVLayout, prompt: tuple[int, ...], num_output_tokens: int
) -> Reference:
    """Greedy, every token from a whole forward pass of its own, and the last pass's logits."""
    token_ids = prompt
    for _ in range(num_output_tokens - 1):
        token_ids = (*token_ids, int(_logits(runner, layout, token_ids)[-1].argmax()))
    logits = _logits(runner, layout, token_ids)
    return Reference(prompt, (*token_ids[len(prompt) :], int(logits[-1].argmax())), logits)


def _logits(runner: ModelRunner, layout: KVLayout, token_ids: tuple[int, ...]) -> Tensor:
    """Of every token, all of them in one step."""
    tables = side_by_side(0, len(token_ids), layout)
    item = ScheduledSequence(make_id(), token_ids, 0, tables, (SampleTask(GREEDY),))
    batch = build_forward_batch(SchedulerOutput((item,), ()), layout.block_size)
    return runner.forward(replace(batch, sample_rows=torch.arange(len(token_ids))))
