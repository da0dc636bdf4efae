"""Settings of a decode worker."""

from dataclasses import dataclass

from paceline.worker.config import WorkerConfig


@dataclass(frozen=True, slots=True)
class DecodeConfig(WorkerConfig):
    """What all workers have; the defaults suit generation."""
