"""On a machine with a GPU: each kernel beside its plain form, and how near kernels and whole steps come to the roofline.

The roof is what this GPU was measured to do just before: bytes a second of a copy, and operations a second of a large product. A step is
that of a model with the geometry of Llama 3.1 8B and random weights, by the runner that a worker has, with CUDA graphs and without.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.gpu_checks import BLOCK_SIZE, Check, attention_call, filled, run_checks
from benchmarks.gpu_roofline import (
    AttentionShape,
    Machine,
    Reached,
    Work,
    attention_work,
    copy_work,
    median,
    reached,
    weights_work,
)
from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BlockId, KVLayout, LayerKV
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.attention import AttentionRules
from paceline.engine.device import Device, find_device
from paceline.engine.model_loader import use_paged_attention
from paceline.engine.model_runner import ModelRunner
from paceline.engine.native_attention import choose_attention
from paceline.engine.padding import DecodeShape
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput

NO_GPU = 2
SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, kv_bytes=2)
DECODE_BATCHES = ((1, 2048), (8, 2048), (64, 2048), (16, 16384))  # sequences, tokens of context
CHUNKS = ((512, 512), (2048, 2048), (512, 8192))  # tokens, tokens of context behind them
_PRODUCT, _COPY_BYTES = 8192, 1 << 31
_GREEDY = SampleTask(SamplingParams(temperature=0.0))


def main(argv: Sequence[str]) -> int:
    """1 where a kernel differs from its plain form, 2 where there is no GPU."""
    args = _parser().parse_args(argv)
    try:
        device = find_device(args.device)
    except ConfigError as error:
        print(f"./run bench gpu: {error}", file=sys.stderr)
        return NO_GPU
    if not device.is_gpu:
        print(
            "./run bench gpu: torch finds no GPU on this machine, and this benchmark measures nothing else",
            file=sys.stderr,
        )
        return NO_GPU
    with torch.inference_mode(), device.entered():
        checks = [_shown(check) for check in run_checks(device, "bfloat16")]
        machine = measure_machine(device)
        print(f"measured: {machine.bytes_a_s / 1e9:,.0f} GB/s, {machine.flops_a_s / 1e12:,.0f} TFLOP/s")
        rows = [_printed(row) for row in (*_kernels(machine, device), *_steps(machine, device, args.layers))]
    if args.json:
        numbers = {
            "device": torch.cuda.get_device_name(device.place),
            "machine": asdict(machine),
            "checks": [asdict(check) for check in checks],
            "reached": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return 0 if all(check.passed for check in checks) else 1


def measure_machine(device: Device) -> Machine:
    """What it does at best, by what torch brings for it."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device.place)
    target = torch.empty_like(source)
    copy_s = timed(lambda: target.copy_(source))
    a, b = (torch.randn(_PRODUCT, _PRODUCT, dtype=torch.bfloat16, device=device.place) for _ in range(2))
    product_s = timed(lambda: a @ b)
    return Machine(copy_work(_COPY_BYTES).num_bytes / copy_s, 2 * _PRODUCT**3 / product_s)


def timed(call: Callable[[], object], num_turns: int = 20) -> float:
    """Seconds of one call on the GPU: the median of several, after some that nobody counts."""
    durations = []
    for turn in range(num_turns + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # it has no annotations
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= 3:
            durations.append(begin.elapsed_time(end) / 1e3)
    return median(durations)


# -- kernels


def _kernels(machine: Machine, device: Device) -> Iterator[Reached]:
    for num_sequences, context in DECODE_BATCHES:
        parts = ((1, context),) * num_sequences
        yield _attention(f"decode attention, {num_sequences} at {context}", parts, machine, device)
    for length, context in CHUNKS:
        yield _attention(f"chunk attention, {length} of {context}", ((length, context),), machine, device)


def _attention(name: str, parts: tuple[tuple[int, int], ...], machine: Machine, device: Device) -> Reached:
    layer = LayerKV(SHAPE.num_kv_heads, SHAPE.head_dim, SHAPE.head_dim)
    cache, batch = filled(layer, "bfloat16", "bfloat16", parts, device)
    rows = len(batch.token_ids)
    query = torch.randn(rows, SHAPE.num_heads, SHAPE.head_dim, dtype=torch.bfloat16, device=device.place)
    call = attention_call(cache, batch, query, AttentionRules(SHAPE.head_dim**-0.5), device)
    return reached(name, attention_work(SHAPE, parts, 2), timed(call), machine)


# -- whole steps


def _steps(machine: Machine, device: Device, num_layers: int) -> Iterator[Reached]:
    model, layout = _model(device, num_layers)
    weights = _weights_of(model)
    for num_sequences, context in DECODE_BATCHES:
        parts = ((1, context),) * num_sequences
        work = step_work(weights, num_layers, parts)
        for has_graph in (False, True):
            runner, output = _runner(model, layout, parts)
            if has_graph:
                _capture(runner, DecodeShape(num_sequences, context), device)
            name = f"decode step, {num_sequences} at {context}, {'graph' if has_graph else 'calls'}"
            yield reached(name, work, timed(lambda: runner.execute(output)), machine)  # noqa: B023 - called at once
    for length, context in CHUNKS:
        parts = ((length, context),)
        runner, output = _runner(model, layout, parts)
        duration_s = timed(lambda: runner.execute(output))  # noqa: B023 - called at once
        yield reached(
            f"chunk step, {length} of {context}",
            step_work(weights, num_layers, parts),
            duration_s,
            machine,
        )


@dataclass(frozen=True, slots=True)
class Weights:
    """How many of a model's weights each token meets, and how many only those after which one is chosen. Embeddings are looked up."""

    of_layers: int
    of_head: int


def step_work(weights: Weights, num_layers: int, parts: Sequence[tuple[int, int]]) -> Work:
    """All weights, and the attention of each layer; the head for one token of each sequence."""
    num_tokens = sum(length for length, _ in parts)
    body, head = weights_work(weights.of_layers, num_tokens, 2), weights_work(weights.of_head, len(parts), 2)
    return body.plus(head).plus(attention_work(SHAPE, parts, 2), num_layers)


def _weights_of(model: PreTrainedModel) -> Weights:
    named = {name: weight.numel() for name, weight in model.named_parameters() if "embed" not in name}
    of_head = sum(count for name, count in named.items() if name.startswith("lm_head"))
    return Weights(sum(named.values()) - of_head, of_head)


def _model(device: Device, num_layers: int) -> tuple[PreTrainedModel, KVLayout]:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=False,
    )
    with torch.device(device.place):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()  # type: ignore[no-untyped-call] # it has no annotations
    layout = use_paged_attention(model, "bfloat16", BLOCK_SIZE)
    choose_attention(model, "triton")
    return model, layout


def _runner(
    model: PreTrainedModel, layout: KVLayout, parts: Sequence[tuple[int, int]]
) -> tuple[ModelRunner, SchedulerOutput]:
    """With room for just these sequences, and the step of their last tokens. What was before them is zeros, which takes as long."""
    items, first = [], 0
    for index, (length, context) in enumerate(parts):
        num_blocks = -(-context // BLOCK_SIZE)
        table = tuple(BlockId(first + ordinal) for ordinal in range(num_blocks))
        sequence_id = SequenceId(RequestId("bench"), index)
        items.append(ScheduledSequence(sequence_id, (7,) * length, context - length, (table,), (_GREEDY,)))
        first += num_blocks
    return ModelRunner(model, layout, first, has_scratch=True), SchedulerOutput(tuple(items), ())


def _capture(runner: ModelRunner, shape: DecodeShape, device: Device) -> None:
    # Imported here: without a GPU nobody comes so far, and need not have triton.
    from paceline.engine.decode_graphs import CudaCapture  # noqa: PLC0415

    runner.capture_decodes([shape], CudaCapture(device))


# -- what is said


def _shown(check: Check) -> Check:
    print(
        f"{'ok' if check.passed else 'WRONG':<6}{check.name:<28}{check.difference:.2g} (at most {check.allowed:g})"
    )
    return check


def _printed(row: Reached) -> Reached:
    bound = (
        f"{row.bytes_a_s / 1e9:>8,.0f} GB/s  "
        if row.is_bound_by_memory
        else f"{row.flops_a_s / 1e12:>8,.0f} TFLOP/s"
    )
    print(f"{row.name:<36}{row.duration_s * 1e3:>10.3f} ms{bound} {row.share:>7.1%} of the roof")
    return row


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench gpu", description=__doc__)
    parser.add_argument("--device", default="auto", metavar="cuda:N", help="which GPU (default: the first)")
    parser.add_argument(
        "--layers",
        type=int,
        default=32,
        metavar="N",
        help="layers of the model (default: 32, 16 GB of weights)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    return parser
