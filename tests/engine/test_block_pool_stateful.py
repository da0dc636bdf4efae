"""Random histories of a block pool against what the memory of its blocks would hold."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.core.block_hash import BlockHash, chain_root, hash_block
from paceline.core.kv_layout import BlockId
from paceline.core.prefix import PrefixEntry
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_block import CachedBlock

BLOCK_SIZE = 2
ROOTS = [chain_root(b"model", scope) for scope in ("a", "b")]
Tokens = tuple[int, ...]
# Few and alike, so that the same prefixes are computed at the same time, evicted, and computed again.
PROMPTS: list[Tokens] = [(0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (0, 0, 1, 1, 1), (1, 1, 1)]


@dataclass(eq=False)
class Holder:
    """A sequence as the pool sees one: blocks, and how many of them it has published."""

    root: BlockHash
    token_ids: Tokens
    block_ids: list[BlockId]
    published: list[CachedBlock]
    hashes: list[BlockHash] = field(default_factory=list)


class BlockPoolMachine(RuleBasedStateMachine):
    """Prompts that share prefixes come, are computed block by block, and go; memory is always short."""

    hash_bytes = 16

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8, BLOCK_SIZE)
        self.live: list[Holder] = []
        # What was computed into each block: the whole prefix that its content depends on.
        self.memory: dict[BlockId, tuple[BlockHash, Tokens]] = {}
        self.entries: set[PrefixEntry] = set()

    @rule(root=st.sampled_from(ROOTS), tokens=st.sampled_from(PROMPTS))
    def start(self, root: BlockHash, tokens: Tokens) -> None:
        """A prompt comes: its cached prefix is found, and the rest gets blocks if there is room."""
        hashes = self._hashes(root, tokens)
        hits = self.pool.lookup(root, hashes, tokens)
        for ordinal, hit in enumerate(hits):
            assert self.memory[hit.held_id] == (root, tokens[: (ordinal + 1) * BLOCK_SIZE])
        num_new = -(-len(tokens) // BLOCK_SIZE) - len(hits)
        if self.pool.num_available_after(hits) < num_new:
            return
        block_ids = self.pool.acquire(hits) + self._allocate(num_new)
        self.live.append(Holder(root, tokens, block_ids, list(hits), hashes))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def compute(self, index: int) -> None:
        """The next full block of a sequence is computed, and published unless the chain is broken."""
        holder = self.live[index % len(self.live)]
        ordinal = len(holder.published)
        if ordinal == len(holder.hashes):
            return
        start, end = ordinal * BLOCK_SIZE, (ordinal + 1) * BLOCK_SIZE
        block_id = holder.block_ids[ordinal]
        self.memory[block_id] = (holder.root, holder.token_ids[:end])
        parent = holder.published[-1] if holder.published else None
        tokens = holder.token_ids[start:end]
        cached = self.pool.publish(block_id, holder.hashes[ordinal], holder.root, parent, tokens, 0)
        if cached is not None:
            holder.published.append(cached)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 7))
    def finish(self, index: int) -> None:
        """A sequence ends and lets go."""
        self.pool.release(self.live.pop(index % len(self.live)).block_ids)

    @rule()
    def exhaust(self) -> None:
        """Somebody needs all the memory for a moment: nothing stays cached that nobody holds."""
        self.pool.release(self._allocate(self.pool.num_available))

    @rule()
    def take_changes(self) -> None:
        """Whoever follows the changes knows exactly what is cached."""
        changes = self.pool.take_changes()
        assert not set(changes.published) & set(changes.evicted)
        self.entries = (self.entries - set(changes.evicted)) | set(changes.published)
        assert len(self.entries) == self.pool.stats().num_cached

    @invariant()
    def books_are_right(self) -> None:
        """Every block is free or held by exactly those who hold it; without collisions none is counted."""
        self.pool.check_invariants(holder.block_ids for holder in self.live)
        if self.hash_bytes == 16:
            assert self.pool.stats().num_collisions == 0

    def _allocate(self, num_blocks: int) -> list[BlockId]:
        block_ids = self.pool.allocate(num_blocks)
        held = {block_id for holder in self.live for block_id in holder.block_ids}
        assert not held & set(block_ids), "a held block was given away"
        for block_id in block_ids:
            self.memory.pop(block_id, None)
        return block_ids

    def _hashes(self, root: BlockHash, tokens: Tokens) -> list[BlockHash]:
        hashes: list[BlockHash] = []
        for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE):
            parent = hashes[-1] if hashes else root
            block_hash = hash_block(parent, tokens[end - BLOCK_SIZE : end])
            hashes.append(BlockHash(block_hash[: self.hash_bytes]))
        return hashes


class CollidingBlockPoolMachine(BlockPoolMachine):
    """The same with a hash of one bit: nearly everything collides, and still nobody gets another's block."""

    hash_bytes = 1

    def _hashes(self, root: BlockHash, tokens: Tokens) -> list[BlockHash]:
        return [BlockHash(bytes([block_hash[0] & 1])) for block_hash in super()._hashes(root, tokens)]


SETTINGS = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = SETTINGS
TestCollidingBlockPool = CollidingBlockPoolMachine.TestCase
TestCollidingBlockPool.settings = SETTINGS


@pytest.mark.parametrize("machine", [BlockPoolMachine, CollidingBlockPoolMachine])
def test_long_histories_keep_the_books_right(machine: type[BlockPoolMachine]) -> None:
    """What takes many steps to go wrong, such as a prefix that is evicted before its continuation, does not."""
    rng = random.Random(5)
    for _ in range(100):
        pool = machine()
        for _ in range(200):
            _random_step(pool, rng)
            pool.books_are_right()


def _random_step(machine: BlockPoolMachine, rng: random.Random) -> None:
    steps: dict[str, Callable[[], None]] = {
        "start": lambda: machine.start(rng.choice(ROOTS), rng.choice(PROMPTS)),
        "exhaust": machine.exhaust,
        "take_changes": machine.take_changes,
    }
    if machine.live:
        steps |= {"compute": lambda: machine.compute(rng.randrange(8))}
        steps |= {"finish": lambda: machine.finish(rng.randrange(8))}
    steps[rng.choice(list(steps))]()
