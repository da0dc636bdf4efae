"""Rank 0's side: says each step to the followers before it computes it itself, and answers when all have done it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import KVLayout
from paceline.engine.kv_cache import KVCache
from paceline.engine.model_runner import ModelRunner
from paceline.engine.parallel.cuts import cut
from paceline.engine.parallel.group import join_group
from paceline.engine.parallel.link import Link
from paceline.engine.parallel.messages import Pool, Start, ToFollower, decode_to_leader, encode, step_of
from paceline.engine.parallel.place import Place
from paceline.engine.parallel.plan import require_place
from paceline.engine.parallel.stages import StagedForward
from paceline.engine.step import SchedulerOutput, StepOutput
from paceline.runtime.pool_memory import PoolMemory

# Tokens of a batch of a pipeline beyond the one that each stage computes anyway.
_WORTH_A_CALL = 64


class Followers:
    """The other ranks of this worker, from 1 on, in order. Used by one thread at a time.

    Raises EngineFailedError when one is lost, or has not done what it was told for `timeout_s`.
    """

    def __init__(
        self, links: Sequence[Link], rendezvous: str, timeout_s: float, *, tp: int = 1, pp: int = 1
    ) -> None:
        self._links = tuple(links)
        self.tp = tp
        self.pp = pp
        self.rendezvous = rendezvous
        self.timeout_s = timeout_s

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


class ParallelRunner:
    """A Runner whose model several processes compute, in parts or in stages. This one alone chooses tokens.

    Nobody else has to be told of blocks that are copied, swapped or handed over: all have the same memory, and a block in it is whole.
    """

    def __init__(self, runner: ModelRunner, followers: Followers, stage: StagedForward | None = None) -> None:
        self._runner = runner
        self._followers = followers
        self._stage = stage
        if stage is not None:
            # What the checks at start took is nobody's.
            stage.take_wait_s()

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
        batches = cut(output, _num_batches(output, self._followers.pp))
        self._followers.say(step_of(batches, torch.get_num_threads()))
        step = self._runner.execute_batches(batches)
        # Only now is what they have written to the pool there for others to read.
        self._followers.wait_done()
        if self._stage is not None:
            step = replace(step, bubble_s=self._stage.take_wait_s())
        return step


def _num_batches(output: SchedulerOutput, num_stages: int) -> int:
    """One for each stage. More leave less of a stage's time unused, where they are large enough to be worth a call."""
    if num_stages == 1:
        return 1
    num_tokens = sum(len(item.token_ids) for item in output.scheduled)
    return min(2 * num_stages, max(num_stages, num_tokens // _WORTH_A_CALL))


def joined_by(followers: Followers, model: Path, dtype: str, block_size: int, attention: str) -> Place:
    """Has all ranks find each other, and the followers load what is theirs, as rank 0 now has to; gives its own place."""
    tp, pp, rendezvous, timeout_s = followers.tp, followers.pp, followers.rendezvous, followers.timeout_s
    require_place(model, tp=tp, pp=pp)
    num_threads = torch.get_num_threads()
    followers.start(
        [
            Start(rank, tp, pp, rendezvous, timeout_s, num_threads, str(model), dtype, block_size, attention)
            for rank in range(1, tp * pp)
        ]
    )
    place = Place.of(0, tp=tp, pp=pp)
    join_group(place, rendezvous, timeout_s)
    return place


def share_pool(layout: KVLayout, num_blocks: int, followers: Followers) -> PoolMemory:
    """Memory for so many blocks that all ranks have mapped, and nobody else can write to."""
    pool = PoolMemory(num_blocks * layout.block_bytes, is_sealed=False)
    if pool.offer is None:
        raise ConfigError("--tp and --pp need memory that processes can share, which only Linux has")
    followers.say(Pool(num_blocks, layout.dtype, pool.offer))
    followers.wait_done()
    pool.seal()
    return pool
