"""What steps reach of what the machine can do."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.roofline.limits import Limits
from benchmarks.roofline.work import ModelSize
from benchmarks.simulator.measure import StepSample


@dataclass(frozen=True, slots=True)
class Steps:
    """Of one round: those of one decode, of many, and those of a prompt."""

    single: Sequence[StepSample]
    batch: Sequence[StepSample]
    prompt: Sequence[StepSample]


def shares_of(size: ModelSize, limits: Limits, steps: Steps) -> dict[str, float]:
    """Each between 0 and 1 of the limits of the same round."""
    single, batch = map(_middle, (steps.single, steps.batch))
    prompt_s = sum(sample.duration_s for sample in steps.prompt)
    flops = sum(size.linear_flops(each.work) + size.attention_flops(each.work) for each in steps.prompt)
    num_bytes = size.weight_bytes + size.kv_bytes(single.work)
    return {
        "decode_b1_bandwidth_share": num_bytes / single.duration_s / limits.memory,
        "decode_b32_roofline_share": least_s(size, limits, batch) / batch.duration_s,
        "prefill_2048_flop_share": flops / prompt_s / limits.gemm,
        "decode_b1_ms": 1e3 * single.duration_s,
        "decode_b32_ms": 1e3 * batch.duration_s,
        "prefill_2048_ms": 1e3 * prompt_s,
    }


def least_s(size: ModelSize, limits: Limits, sample: StepSample) -> float:
    """The linear layers and the attention of decodes one after the other, each as long as it has to read or to compute."""
    linear_s = max(size.weight_bytes / limits.memory, size.linear_flops(sample.work) / limits.gemm)
    attention_s = max(
        size.kv_bytes(sample.work) / limits.memory, size.attention_flops(sample.work) / limits.gemm
    )
    return linear_s + attention_s


def _middle(samples: Sequence[StepSample]) -> StepSample:
    """The step that took the median."""
    return sorted(samples, key=lambda sample: sample.duration_s)[len(samples) // 2]
