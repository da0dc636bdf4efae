"""Settings of a prefill worker."""

from dataclasses import dataclass

from paceline.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class PrefillConfig(WorkerConfig):
    """What all workers have; the defaults suit prompts."""
