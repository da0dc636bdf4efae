"""What a worker does at start where it computes on a GPU: sees how much memory a step leaves for KV, and captures decodes as graphs."""

import time
from dataclasses import dataclass

import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BlockId
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.model_loader import LoadedModel
from paceline.engine.model_runner import ModelRunner
from paceline.engine.padding import decode_shapes
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput
from paceline.runtime.log import get_logger
from paceline.runtime.memory import shown_bytes

_NOBODY = SequenceId(RequestId("largest-step"), 0)
_DRAWN = SamplingParams(temperature=1.0, top_p=0.9)
log = get_logger()


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Of one GPU, in bytes, while this process has its weights there and nothing is computed."""

    total_bytes: int
    free_bytes: int
    own_bytes: int  # what this process has taken: its weights
    step_bytes: int  # what the largest step takes beside them, and gives back

    def for_kv(self, share: float, num_sharing: int) -> int:
        """What is left for KV where `num_sharing` workers take `share` of the GPU together; ConfigError if that is nothing.

        Whoever else computes there has its memory already: of what is free, all but the rest beside the share is for us.
        """
        of_share = int(share * self.total_bytes / num_sharing) - self.own_bytes
        of_free = self.free_bytes - int((1 - share) * self.total_bytes)
        left = min(of_share, of_free) - self.step_bytes
        if left <= 0:
            raise ConfigError(
                f"--gpu-memory-share {share:g} of {shown_bytes(self.total_bytes)}, for {num_sharing} workers, leaves nothing for KV: "
                f"the weights take {shown_bytes(self.own_bytes)}, the largest step {shown_bytes(self.step_bytes)}, and "
                f"{shown_bytes(self.free_bytes)} are free; raise it, or lower --max-num-batched-tokens"
            )
        return left


def largest_step(
    max_tokens: int, max_sequences: int, max_model_tokens: int, *, num_groups: int, block_size: int
) -> SchedulerOutput:
    """As many tokens as a step may have, of as many sequences, each of which samples. All write to the same first blocks."""
    num_sequences = min(max_tokens, max(max_sequences, -(-max_tokens // max_model_tokens)))
    length = max_tokens // num_sequences
    last = max_tokens - length * (num_sequences - 1)
    table = tuple(BlockId(block) for block in range(-(-last // block_size)))
    task = SampleTask(_DRAWN)
    return SchedulerOutput(
        tuple(
            ScheduledSequence(_NOBODY, (0,) * num_tokens, 0, (table,) * num_groups, (task,))
            for num_tokens in (*[length] * (num_sequences - 1), last)
        ),
        (),
    )


def measure(loaded: LoadedModel, max_tokens: int, max_sequences: int) -> GpuMemory:
    """By computing the largest step, with a cache of its own that is thrown away."""
    place, layout = loaded.device.place, loaded.layout
    output = largest_step(
        max_tokens,
        max_sequences,
        loaded.max_model_tokens,
        num_groups=len(layout.groups),
        block_size=layout.block_size,
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(place)
    torch.cuda.reset_peak_memory_stats(place)
    try:
        num_blocks = len(output.scheduled[-1].block_tables[0])
        ModelRunner(loaded.model, layout, num_blocks).execute(output)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of --max-num-batched-tokens {max_tokens} does not fit on {place} beside the weights; lower it"
        ) from error
    peak = torch.cuda.max_memory_reserved(place)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(place)
    return GpuMemory(total, free, torch.cuda.memory_reserved(place), max(0, peak - before))


def can_capture(loaded: LoadedModel, runner: ModelRunner) -> bool:
    """Whether a decode step is only work of kernels: a mixture looks at its routers' choices, and latents are joined on the host."""
    attention = loaded.model.config._attn_implementation  # noqa: SLF001 - transformers has no public name for it
    is_plain = not (runner.has_experts or loaded.layout.has_latents or loaded.layout.dtype == "int4")
    return attention == "paceline_triton" and is_plain


def capture_decodes(loaded: LoadedModel, runner: ModelRunner, max_rows: int, max_model_tokens: int) -> None:
    """Captures all shapes, before anybody waits. A model that cannot be captured is computed without, and the log says why."""
    if max_rows == 0:
        return
    if not can_capture(loaded, runner):
        log.warning("decodes_not_captured", reason="the model or its attention is not all kernels")
        return
    # Imported here: it needs triton.
    from paceline.engine.decode_graphs import CudaCapture  # noqa: PLC0415

    shapes, start_s = decode_shapes(max_rows, max_model_tokens), time.perf_counter()
    try:
        runner.capture_decodes(shapes, CudaCapture(loaded.device))
    except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
        log.warning("decodes_not_captured", reason=str(error).partition("\n")[0])
        return
    log.info("decodes_captured", num_graphs=len(shapes), duration_s=round(time.perf_counter() - start_s, 3))
