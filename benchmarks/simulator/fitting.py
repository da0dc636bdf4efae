"""Fits a cost model to measured steps by least squares, and says how well it does."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulator.cost import CostModel, StepWork
from benchmarks.simulator.measure import StepSample
from benchmarks.simulator.slo import percentile

Array = NDArray[np.float64]
# The numbers of a cost model that a step's work is multiplied by, in the order of _features.
COEFFICIENTS = ("base_s", "decode_s", "decode_context_s", "chunk_s", "chunk_token_s", "chunk_context_s")
_NUM_REWEIGHTINGS = 20
# Relative errors below this count alike: the last percent is noise.
_SMALL = 0.02
_LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model, and how far its steps are from the measured ones, as shares of these."""

    model: CostModel
    num_samples: int
    residual_p50: float
    residual_p95: float
    residual_mean: float


def fit(samples: Sequence[StepSample], name: str, kv_bytes_per_token: int) -> Fit:
    """The cost model closest to the samples: relative errors count, and a step that something disturbed counts little."""
    features = np.array([_features(sample.work) for sample in samples])
    measured = np.array([sample.duration_s for sample in samples])
    weights = 1 / measured
    numbers = _least_squares(features, measured, weights)
    for _ in range(_NUM_REWEIGHTINGS):
        error = np.abs(features @ numbers / measured - 1)
        # The square of a weighted error comes to its absolute value.
        weights = 1 / measured / np.sqrt(np.maximum(error, _SMALL))
        numbers = _least_squares(features, measured, weights)
    # However noisy the samples were, a step takes time.
    numbers[0] = max(numbers[0], _LEAST_S)
    model = CostModel(
        name=name,
        kv_bytes_per_token=kv_bytes_per_token,
        **dict(zip(COEFFICIENTS, map(float, numbers), strict=True)),  # type: ignore[arg-type] # none of them is the noise
    )
    residuals = features @ numbers / measured - 1
    sizes = np.abs(residuals).tolist()
    return Fit(model, len(samples), percentile(sizes, 0.5), percentile(sizes, 0.95), float(residuals.mean()))


def with_noise(found: Fit, samples: Sequence[StepSample]) -> Fit:
    """The same, and how far each of some measured steps was from it, in their order."""
    noise = tuple(sample.duration_s / found.model.step_s(sample.work) for sample in samples)
    return replace(found, model=replace(found.model, noise=noise))


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.num_decodes,
        work.num_decode_context,
        work.num_chunks,
        work.num_chunk_tokens,
        work.num_chunk_context,
    )


def _least_squares(features: Array, measured: Array, weights: Array) -> Array:
    """No number comes out negative: whatever would, has no part in it."""
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept] * weights[:, None], measured * weights, rcond=None)
        if (found >= 0).all():
            break
        kept = [index for index, value in zip(kept, found, strict=True) if value > 0]
    numbers = np.zeros(features.shape[1])
    numbers[kept] = found
    return numbers
