"""Computes a step on a transformers model, unmodified: one ragged forward pass over our paged KV cache."""

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.errors import UnsupportedModelError
from paceline.core.kv_layout import ALL_HEADS, BlockId, HeadPart, KVLayout
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.attention import AttentionContext, current_attention
from paceline.engine.device import Device
from paceline.engine.expert_load import ExpertLoad
from paceline.engine.forward_batch import ForwardBatch, build_forward_batch, on_device
from paceline.engine.kv_cache import KVCache
from paceline.engine.latent import LatentCache
from paceline.engine.padding import DecodeShape
from paceline.engine.probe import takes_rows
from paceline.engine.sampler import Choose, sample
from paceline.engine.scoring import score
from paceline.engine.step import BlockTable, SampleTask, ScheduledSequence, SchedulerOutput, StepOutput
from paceline.runtime.pool_memory import PoolMemory

if TYPE_CHECKING:
    from paceline.engine.decode_graphs import Capture, DecodeGraphs

# How far (relative L2) our logits may lie from transformers' own before a model is refused at start, by the type of the
# weights. An 8-bit cache would need ten times as much, which could hide a mistake: the check is made without one.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


class ModelRunner:
    """Owns the model and the KV memory. Used by one thread.

    Of a model that several processes compute it has what belongs to `heads`, and `pool` is theirs in common; `layout` is of all heads.
    It computes where the model is. With `has_scratch` there is a block more, which is no sequence's: `capture_decodes` needs it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layout: KVLayout,
        num_blocks: int,
        *,
        tells_experts: bool = False,
        heads: HeadPart = ALL_HEADS,
        pool: PoolMemory | None = None,
        has_scratch: bool = False,
    ) -> None:
        self.device = Device(model.device)
        self.memory = KVCache(layout, num_blocks + has_scratch, heads=heads, pool=pool, device=self.device)
        self._scratch = BlockId(num_blocks) if has_scratch else None
        self._graphs: DecodeGraphs | None = None
        self._choose = _chooser(self.device)
        self._model = model
        self._layout = layout
        self._keeps_rows = takes_rows(model)
        self._has_latents = layout.has_latents
        self._expert_load = ExpertLoad(model)
        self._tells_experts = tells_experts

    @property
    def has_experts(self) -> bool:
        """Whether the model is a mixture whose choices can be seen."""
        return self._expert_load.has_routers

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        return self.execute_batches([output])

    def execute_batches(self, outputs: Sequence[SchedulerOutput]) -> StepOutput:
        """The same of a step that is cut into batches, in their order."""
        with torch.inference_mode(), self.device.entered():
            sampled, scored = [], []
            for output in outputs:
                logits = self._computed(output)
                num_samples = sum(len(item.samples) for item in output.scheduled)
                sampled.append(logits[:num_samples])
                scored.append(logits[num_samples:])
            items = [item for output in outputs for item in output.scheduled]
            if not self.device.is_host:
                self.memory.fetch(filled_blocks(items, self._layout.block_size))
            tasks = [task for item in items for task in item.samples]
            positions = [item.end for item in items for _ in item.samples]
            step = sample(_joined(sampled).float(), tasks, positions, self._choose)
            scores = score(_joined(scored), [item.score for item in items if item.score is not None])
            # A step that chooses nothing waits here: its blocks may be read as soon as it has ended.
            self.device.finish()
            return replace(
                step,
                scores=scores,
                expert_tokens=self._expert_load.take(),
                experts=self._expert_load.take_experts(),
            )

    def _computed(self, output: SchedulerOutput) -> Tensor:
        """The logits of a batch: by a graph, if there is one for it."""
        if self._graphs is not None and (logits := self._graphs.logits(output)) is not None:
            return logits
        batch = build_forward_batch(output, self._layout.block_size)
        with self._expert_load.counting(batch.sample_rows if self._tells_experts else None):
            return self.forward(on_device(batch, self.device))

    def capture_decodes(self, shapes: Sequence[DecodeShape], capture: "Capture") -> None:
        """From now on decode steps that fit one of the shapes are computed by what `capture` gives."""
        assert self._scratch is not None, "padding needs a block that is no sequence's"
        # Imported here: it needs triton, as does the attention that it is for.
        from paceline.engine.decode_graphs import DecodeGraphs  # noqa: PLC0415

        with torch.inference_mode(), self.device.entered():
            self._graphs = DecodeGraphs.captured(
                shapes, self._layout, self.device, self._forward, capture, self._scratch
            )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The logits of the batch's logit rows, [num_samples + num_targets, vocab_size]; stores the KV of all its tokens.

        The batch is where the model is.
        """
        return self._forward(batch, {})

    def _forward(self, batch: ForwardBatch, shared: dict[Any, Any]) -> Tensor:
        """The same, with what the layers share as far as it is known before."""
        token = current_attention.set(AttentionContext(self.memory, batch, shared))
        try:
            return self._logits(batch)
        finally:
            current_attention.reset(token)

    def _logits(self, batch: ForwardBatch) -> Tensor:
        more: dict[str, Any] = {"logits_to_keep": batch.logit_rows} if self._keeps_rows else {}
        if self._has_latents:
            more["cache"] = LatentCache()
        output = self._model(
            input_ids=batch.token_ids[None], position_ids=batch.positions[None], use_cache=False, **more
        )
        logits: Tensor = output.logits[0]
        return logits if self._keeps_rows else logits[batch.logit_rows]


def filled_blocks(items: Sequence[ScheduledSequence], block_size: int) -> list[BlockId]:
    """The blocks whose last token a step computes, each once."""
    return list(
        dict.fromkeys(
            block_id
            for item in items
            for table in item.block_tables
            for block_id in table[item.start // block_size : item.end // block_size]
            if block_id is not None
        )
    )


def _chooser(device: Device) -> Choose | None:
    """A kernel that chooses tokens, on a GPU where triton is; None: the plain form."""
    if not device.is_gpu or find_spec("triton") is None:
        return None
    from paceline.engine.kernels.triton.sampling import choose_tokens  # noqa: PLC0415 - few have triton

    return choose_tokens


def _joined(logits: list[Tensor]) -> Tensor:
    """Without a copy where there is nothing to join."""
    return logits[0] if len(logits) == 1 else torch.cat(logits)


@torch.inference_mode()
def require_same_as_transformers(runner: ModelRunner, model: PreTrainedModel, layout: KVLayout) -> None:
    """Refuses a model that our attention would serve wrongly, by comparing two sequences in one batch with its own.

    Some models never ask for the keys and values that we keep, or mix up the sequences of a batch; none says so.
    """
    vocab_size = model.config.get_text_config().vocab_size
    prompts = [[(7 * i + start) % vocab_size for i in range(layout.block_size + 3)] for start in (1, 5)]
    ours = _paged_logits(runner, prompts, layout)
    attention = model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    model.set_attn_implementation("eager")
    try:
        theirs = torch.stack(
            [
                model(torch.tensor([prompt], device=model.device), use_cache=False).logits[0, -1]
                for prompt in prompts
            ]
        )
    finally:
        model.set_attn_implementation(attention)
    error = float((ours.float() - theirs.float()).norm() / theirs.float().norm())
    if not error <= _TOLERANCE[layout.dtype]:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other logits with paged attention than by itself "
            f"(relative distance {error:.2g}); it cannot be served"
        )


def _paged_logits(runner: ModelRunner, prompts: list[list[int]], layout: KVLayout) -> Tensor:
    """Each prompt in two chunks, the second ones together."""
    logits = torch.empty(0)
    for start, end in ((0, layout.block_size), (layout.block_size, len(prompts[0]))):
        scheduled = tuple(
            ScheduledSequence(
                sequence_id=SequenceId(RequestId("probe"), index),
                token_ids=tuple(prompt[start:end]),
                start=start,
                block_tables=side_by_side(index, len(prompt), layout),
                samples=(SampleTask(SamplingParams()),),
            )
            for index, prompt in enumerate(prompts)
        )
        batch = build_forward_batch(SchedulerOutput(scheduled, ()), layout.block_size)
        logits = runner.forward(on_device(batch, runner.device))
    return logits


def side_by_side(index: int, num_tokens: int, layout: KVLayout) -> tuple[BlockTable, ...]:
    """Block tables of the sequence with this index among several of `num_tokens` tokens, from the first block on."""
    num_blocks, num_groups = -(-num_tokens // layout.block_size), len(layout.groups)
    firsts = (num_blocks * (index * num_groups + group) for group in range(num_groups))
    return tuple(tuple(BlockId(first + ordinal) for ordinal in range(num_blocks)) for first in firsts)
