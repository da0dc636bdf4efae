"""The one rule of a look-up: what counts is how far each worker's blocks go from the first without a gap."""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet

from paceline.core.prefix import WorkerKey


def leading_blocks(holders: Iterable[AbstractSet[WorkerKey]]) -> dict[WorkerKey, int]:
    """Out of who holds each block of a chain, in order: the number of leading blocks of each worker."""
    num_leading: dict[WorkerKey, int] = {}
    for index, here in enumerate(holders):
        going_on = [worker for worker in here if num_leading.get(worker, 0) == index]
        if not going_on:
            break
        num_leading.update(dict.fromkeys(going_on, index + 1))
    return num_leading
