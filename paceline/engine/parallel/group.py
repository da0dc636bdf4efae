"""The group of processes in which parts of a model are added up, and stages hand on: torch.distributed, gloo on CPUs."""

import os
import sys
from datetime import timedelta

import torch
from torch import distributed

from paceline.core.errors import ConfigError
from paceline.engine.parallel.place import Place


def join_group(place: Place, rendezvous: str, timeout_s: float) -> None:
    """Returns when all are there. What takes one of them longer than `timeout_s`, since it is lost or hangs, raises RuntimeError."""
    if torch.accelerator.is_available():
        raise ConfigError(
            "--tp and --pp compute on CPUs only so far: hide the GPUs, with CUDA_VISIBLE_DEVICES set to nothing"
        )
    # By default it listens on whatever the machine's name stands for.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=place.in_group,
        world_size=place.count,
        timeout=timedelta(seconds=timeout_s),
    )


def set_threads_of_each(num_threads: int, *, num_ranks: int) -> None:
    """This process computes on its share of the worker's threads, on one at least; 0 threads are torch's own choice."""
    torch.set_num_threads(max(1, (num_threads or torch.get_num_threads()) // num_ranks))
