"""What exact mode promises and what it costs: random schedules on tiny models, then timed steps of a 135M-parameter model.

Both modes run side by side in one process on the same steps, taking turns, after a warm-up; a time is a median.
"""

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel
from transformers.utils import logging

from benchmarks.schedules import Counts, Witness, run_schedule
from paceline.core.kv_layout import KVLayout
from paceline.core.request import RequestId, SamplingParams, SequenceId
from paceline.engine.conformance.architectures import build_tiny
from paceline.engine.exact.model import make_exact
from paceline.engine.forward_batch import ForwardBatch, build_forward_batch
from paceline.engine.kv_cache import TORCH_DTYPES
from paceline.engine.model_loader import load_model, use_paged_attention
from paceline.engine.model_runner import ModelRunner, side_by_side
from paceline.engine.step import SampleTask, ScheduledSequence, SchedulerOutput

MODES = ("fast", "exact")
# Plain; key biases; windows with soft caps; windows; windows with sinks and experts; experts; one key head.
TINY = ("llama", "qwen2", "gemma2", "gemma3", "gpt_oss", "mixtral", "gpt_bigcode")
_TINY_BLOCK_SIZE = 8
_BLOCK_SIZE = 16
# The shape of SmolLM2-135M, the default model; the time of a step does not depend on the weights.
_SMALL = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step: so many sequences, each with a context already there and new tokens to compute."""

    name: str
    num_sequences: int
    context_tokens: int
    new_tokens: int

    @property
    def end(self) -> int:
        """Tokens of each sequence once it is computed."""
        return self.context_tokens + self.new_tokens


WORKLOADS = (
    Workload("decode 1 at 256", 1, 256, 1),
    Workload("decode 8 at 256", 8, 256, 1),
    Workload("decode 32 at 256", 32, 256, 1),
    Workload("decode 8 at 2048", 8, 2048, 1),
    Workload("chunk 128 at 0", 1, 0, 128),
    Workload("chunk 512 at 0", 1, 0, 512),
    Workload("chunk 512 at 3584", 1, 3584, 512),
)


@dataclass(frozen=True, slots=True)
class Timing:
    """One workload in both modes. The spread is the distance between the quartiles."""

    workload: str
    fast_ms: float
    exact_ms: float
    fast_spread_ms: float
    exact_spread_ms: float
    exact_over_fast: float


def main(argv: Sequence[str]) -> int:
    """Prints both tables; 1 if any bit differed in exact mode."""
    args = _parser().parse_args(argv)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # transformers has no annotations here
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # the same
    numbers = {**_schedules(args.schedules), **_costs(args)}
    if args.json:
        args.json.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return int(numbers["mismatches"] > 0)


# -- schedules


def _schedules(num_schedules: int) -> dict[str, Any]:
    """Each model and type gets its share of them, in both modes; fast mode shows that they can find something."""
    print(
        f"{num_schedules} random schedules on tiny models: chunk cuts, batch mates, prefix hits, preemptions,"
    )
    print("hand-overs, 1 or 2 threads; every logit and every full KV block compared bit for bit")
    torch.set_num_threads(1)
    found = {
        mode: {dtype: _run_schedules(num_schedules, mode, dtype) for dtype in TORCH_DTYPES} for mode in MODES
    }
    for mode, by_dtype in found.items():
        for dtype, (witness, _) in by_dtype.items():
            print(
                f"  {mode:<6}{dtype:<10}{witness.num_compared:>8} compared{witness.num_mismatches:>8} differ"
                f"   largest drift {witness.max_drift:.1e} standard deviations of a row's logits"
            )
    witnesses = {mode: [witness for witness, _ in by_dtype.values()] for mode, by_dtype in found.items()}
    counts = sum((counts for _, counts in found["exact"].values()), Counts())
    return {
        "schedules": num_schedules,
        "mismatches": sum(witness.num_mismatches for witness in witnesses["exact"]),
        "compared": sum(witness.num_compared for witness in witnesses["exact"]),
        "fast_mismatches": sum(witness.num_mismatches for witness in witnesses["fast"]),
        "fast_drift_std": {dtype: witness.max_drift for dtype, (witness, _) in found["fast"].items()},
        **asdict(counts),
    }


def _run_schedules(num_schedules: int, mode: str, dtype: str) -> tuple[Witness, Counts]:
    together, counts = Witness(), Counts()
    half = range(list(TORCH_DTYPES).index(dtype), num_schedules, len(TORCH_DTYPES))
    for number, name in enumerate(TINY):
        model = _in_dtype(build_tiny(name), dtype)
        layout = use_paged_attention(model, dtype, _TINY_BLOCK_SIZE)
        if mode == "exact":
            make_exact(model)
        witness = Witness()
        for seed in half[number :: len(TINY)]:
            counts += run_schedule(model, layout, witness, seed)
        together.add(witness)
    return together, counts


# -- costs


def _costs(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    what = args.model or "a random Llama of 135M parameters"
    print(
        f"\none step of {what}, {args.dtype}, {args.threads} threads; medians of {args.repeats}, spread in brackets"
    )
    runners = {mode: _runner(args, mode) for mode in MODES}
    timings = []
    for workload in WORKLOADS:
        timing = _time(runners, workload, args.repeats)
        timings.append(timing)
        print(
            f"  {workload.name:<20} fast {timing.fast_ms:>8.1f} ms [{timing.fast_spread_ms:.1f}]"
            f"   exact {timing.exact_ms:>8.1f} ms [{timing.exact_spread_ms:.1f}]"
            f"   exact / fast {timing.exact_over_fast:.2f}",
            flush=True,
        )
    ratio = statistics.geometric_mean(timing.exact_over_fast for timing in timings)
    print(f"exact over fast, geometric mean: {ratio:.2f}")
    return {
        "exact_over_fast_time": ratio,
        "dtype": args.dtype,
        "num_threads": args.threads,
        "repeats": args.repeats,
        "workloads": [asdict(timing) for timing in timings],
    }


def _runner(args: argparse.Namespace, mode: str) -> ModelRunner:
    if args.model:
        loaded = load_model(args.model, args.dtype, _BLOCK_SIZE, mode)
        model, layout = loaded.model, loaded.layout
    else:
        model = _small_model(args.dtype)
        layout = use_paged_attention(model, args.dtype, _BLOCK_SIZE)
        if mode == "exact":
            make_exact(model)
    num_blocks = max(work.num_sequences * layout.num_blocks_for(work.end) for work in WORKLOADS)
    runner = ModelRunner(model, layout, num_blocks)
    for memory in (*runner.memory.keys, *runner.memory.values):
        memory.normal_()
    return runner


def _small_model(dtype: str) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # A config of its own: it is there that a model keeps which attention it runs.
        model = AutoModelForCausalLM.from_config(copy.deepcopy(_SMALL))  # type: ignore[no-untyped-call] # no annotations
    return _in_dtype(model.eval(), dtype)


def _in_dtype(model: PreTrainedModel, dtype: str) -> PreTrainedModel:
    return nn.Module.to(model, TORCH_DTYPES[dtype])


@torch.inference_mode()
def _time(runners: dict[str, ModelRunner], workload: Workload, repeats: int) -> Timing:
    batch = _batch(workload, runners["fast"].memory.layout)
    times_ms: dict[str, list[float]] = {mode: [] for mode in MODES}
    for mode in _turns(repeats + 1):
        start_s = time.perf_counter()
        runners[mode].forward(batch)
        times_ms[mode].append(1e3 * (time.perf_counter() - start_s))
    warm = {mode: sorted(times[1:]) for mode, times in times_ms.items()}
    medians = {mode: statistics.median(times) for mode, times in warm.items()}
    spreads = {mode: times[3 * len(times) // 4] - times[len(times) // 4] for mode, times in warm.items()}
    return Timing(
        workload=workload.name,
        fast_ms=medians["fast"],
        exact_ms=medians["exact"],
        fast_spread_ms=spreads["fast"],
        exact_spread_ms=spreads["exact"],
        exact_over_fast=medians["exact"] / medians["fast"],
    )


def _turns(rounds: int) -> Iterator[str]:
    """Who comes first changes, so that neither always finds the other's caches."""
    rng = random.Random(0)  # noqa: S311 - an order, no secret
    for _ in range(rounds):
        yield from rng.sample(MODES, len(MODES))


def _batch(workload: Workload, layout: KVLayout) -> ForwardBatch:
    scheduled = tuple(
        ScheduledSequence(
            sequence_id=SequenceId(RequestId("bench"), number),
            token_ids=tuple(range(100, 100 + workload.new_tokens)),
            start=workload.context_tokens,
            block_tables=side_by_side(number, workload.end, layout),
            samples=(SampleTask(SamplingParams()),),
        )
        for number in range(workload.num_sequences)
    )
    return build_forward_batch(SchedulerOutput(scheduled, ()), _BLOCK_SIZE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("./run bench exactness", description=__doc__)
    parser.add_argument(
        "--schedules", type=int, default=40, metavar="N", help="random schedules (default: 40)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="time this model instead")
    parser.add_argument("--dtype", default="bfloat16", choices=TORCH_DTYPES, help="of the timed model")
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="for the timed steps (default: 1)"
    )
    parser.add_argument(
        "--repeats", type=int, default=7, metavar="N", help="timed steps a workload (default: 7)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to a file")
    return parser
