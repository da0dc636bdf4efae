"""Rank 0's side: says each step to the followers before it computes it itself, and answers when all have done it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import HeadPart, KVLayout
from paceline.engine.kv_cache import KVCache
from paceline.engine.model_runner import ModelRunner
from paceline.engine.parallel.group import join_group
from paceline.engine.parallel.link import Link
from paceline.engine.parallel.messages import Pool, Start, ToFollower, decode_to_leader, encode, step_of
from paceline.engine.parallel.plan import require_parts
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.runtime.pool_memory import PoolMemory


class Followers:
    """The other ranks of this worker, from 1 on, in order. Used by one thread at a time.

    Raises EngineFailedError when one is lost, or has not done what it was told for `timeout_s`.
    """

    def __init__(self, links: Sequence[Link], rendezvous: str, timeout_s: float) -> None:
        self._links = tuple(links)
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s

    @property
    def num_ranks(self) -> int:
        """All that compute, rank 0 too."""
        return len(self._links) + 1

    def start(self, messages: Sequence[Start]) -> None:
        """To each its own."""
        for link, message in zip(self._links, messages, strict=True):
            link.send(encode(message), timeout_s=self.timeout_s)

    def say(self, message: ToFollower) -> None:
        """The same to all."""
        data = encode(message)
        for link in self._links:
            link.send(data, timeout_s=self.timeout_s)

    def wait_done(self) -> None:
        """Returns when all have done what they were told."""
        for link in self._links:
            decode_to_leader(link.receive(timeout_s=self.timeout_s))

    def close(self) -> None:
        """They end."""
        for link in self._links:
            link.close()


class ParallelRunner:
    """A Runner whose model several processes compute. This one alone chooses tokens.

    Nobody else has to be told of blocks that are copied, swapped or handed over: all have the same memory, and a block in it is whole.
    """

    def __init__(self, runner: ModelRunner, followers: Followers) -> None:
        self._runner = runner
        self._followers = followers

    @property
    def memory(self) -> KVCache:
        """See Runner.memory."""
        return self._runner.memory

    @property
    def has_experts(self) -> bool:
        """See ModelRunner.has_experts."""
        return self._runner.has_experts

    def execute(self, output: SchedulerOutput) -> StepOutput:
        """See Runner.execute."""
        self._followers.say(step_of(output))
        step = self._runner.execute(output)
        # Only now is what they have written to the pool there for others to read.
        self._followers.wait_done()
        return step


def joined_by(followers: Followers, model: Path, dtype: str, block_size: int, attention: str) -> HeadPart:
    """Has all ranks find each other, and the followers load their parts, as rank 0 now has to; gives its own."""
    require_parts(model, followers.num_ranks)
    num_threads, num_ranks = torch.get_num_threads(), followers.num_ranks
    rendezvous, timeout_s = followers.rendezvous, followers.timeout_s
    followers.start(
        [
            Start(
                rank, num_ranks, rendezvous, timeout_s, num_threads, str(model), dtype, block_size, attention
            )
            for rank in range(1, num_ranks)
        ]
    )
    join_group(0, num_ranks, rendezvous, timeout_s)
    return HeadPart(0, num_ranks)


def share_pool(layout: KVLayout, num_blocks: int, followers: Followers) -> PoolMemory:
    """Memory for so many blocks that all ranks have mapped, and nobody else can write to."""
    pool = PoolMemory(num_blocks * layout.block_bytes, is_sealed=False)
    if pool.offer is None:
        raise ConfigError("--tp needs memory that processes can share, which only Linux has")
    followers.say(Pool(num_blocks, layout.dtype, pool.offer))
    followers.wait_done()
    pool.seal()
    return pool
