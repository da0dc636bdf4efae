"""The KV blocks of one sequence: a table for each KV group, with what it holds, still needs, and may let go.

A block's ordinal is its place in the sequence: it holds tokens [ordinal * block_size, (ordinal + 1) * block_size). A
table of a group with a window holds only those ordinals that some token still to come sees:

    whole group    [ 0  1  2  3  4  5  6 ]
    windowed one   [ .  .  .  .  4  5  6 ]     . let go, or never needed
    with a sink    [ 0  .  .  .  4  5  6 ]
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from paceline.core.kv_layout import BlockId
from paceline.core.ticket import ReadyBlock
from paceline.engine.block_pool import BlockPool
from paceline.engine.cached_block import CachedBlock, witness
from paceline.engine.cached_prefix import CachedPrefix, TokenChain
from paceline.engine.group_table import GroupTable
from paceline.engine.places import Places
from paceline.engine.step import BlockTable
from paceline.engine.swap import BlockSaver


class BlockContent(BlockSaver, Protocol):
    """What lies in the blocks, as far as books about them need it."""

    def copy(self, source: BlockId, target: BlockId) -> None:
        """Makes `target` hold what `source` holds."""
        ...

    def checksum(self, block_id: BlockId) -> int:
        """XXH3-64 of the block's bytes."""
        ...


class SequenceBlocks:
    """The tables of one sequence; empty until `reserve`, and again after `release`."""

    def __init__(
        self, pool: BlockPool, content: BlockContent, tables: list[GroupTable] | None = None
    ) -> None:
        self._pool, self._content = pool, content
        self.tables = tables or [GroupTable(index, group) for index, group in enumerate(pool.groups)]
        self._windowed = [table for table in self.tables if table.is_windowed]
        self._only = self.tables[0] if pool.is_whole else None
        # Where a receiver's blocks lie: those that tokens behind the known ones see.
        self.places = Places()
        # Tokens that have a place, and the tables as the runner sees them: both are asked for in every step.
        self.num_tokens_held = 0
        self.view: tuple[BlockTable, ...] = ()
        self._note_change()

    # -- taking room

    def reserve(
        self,
        prefix: CachedPrefix,
        num_tokens: int,
        max_step_tokens: int,
        *,
        is_filled_outside: bool,
        spare: int,
    ) -> bool:
        """Takes the cached prefix, and room for all `num_tokens` known tokens; all or nothing.

        In a group with a window that is room for what one step of `max_step_tokens` tokens sees, or, if the blocks are
        filled from outside, for what comes after them. At least `spare` blocks stay available to others.
        """
        position = num_tokens if is_filled_outside else prefix.num_blocks * self._pool.block_size
        num_blocks = self._num_blocks_for(num_tokens)
        seen = [table.group.blocks_seen(position, num_blocks, self._pool.block_size) for table in self.tables]
        needs = [
            self._need(table, ordinals, prefix.num_blocks, max_step_tokens)
            for table, ordinals in zip(self.tables, seen, strict=True)
        ]
        whole = [block for cached in prefix.by_group for block in cached]
        if self._pool.num_available_after(whole) < sum(needs) + spare:
            return False
        for table, ordinals, need in zip(self.tables, seen, needs, strict=True):
            self._take_prefix(table, ordinals, prefix, need)
            table.first = table.group.view.first_visible(position) // self._pool.block_size
        # Only now: an allocation evicts, and must not take another table's part of the prefix.
        for table, ordinals in zip(self.tables, seen, strict=True):
            if is_filled_outside or not table.is_windowed:
                self._allocate(table, ordinals, num_blocks)
        self.places = Places(self.tables, num_tokens, self._pool.block_size)
        self._note_change()
        return True

    def num_missing(self, end: int) -> int:
        """Blocks that must be available before tokens up to `end` can be computed."""
        return sum(self._shortage(table, end) for table in self.tables)

    def extend(self, end: int) -> None:
        """Makes room for tokens up to `end`. The caller has checked that what is missing is available."""
        if end <= self.num_tokens_held and not self._windowed:
            return
        num_blocks = self._num_blocks_for(end)
        for table in self.tables:
            if table.is_windowed:
                self._pledge(table, self._shortage(table, end))
            if (num_new := num_blocks - len(table.block_ids)) > 0:
                table.block_ids += self._pool.allocate(num_new, table.index)
        self._note_change()

    def num_to_grow(self, num_tokens: int, end: int) -> int:
        """Blocks that tokens from `num_tokens` up to `end`, computed one after the other, will ask for at most."""
        now, then = self._num_blocks_for(num_tokens), self._num_blocks_for(end)
        if then <= now or not self._windowed:
            return max(0, then - now) * len(self.tables)
        return sum(
            min(then, group.max_live_blocks(1, self._pool.block_size) if group.is_windowed else then)
            - min(now, group.max_live_blocks(1, self._pool.block_size) if group.is_windowed else now)
            for group in self._pool.groups
        )

    def num_exclusive(self) -> int:
        """Blocks that come free when this sequence gives its own up: those that nobody else holds, and pledged ones."""
        return sum(
            table.pledged if table.is_windowed else self._pool.num_exclusive(table.held_ids)
            for table in self.tables
        )

    # -- parting

    def num_needed_to_fork(self, num_tokens: int) -> int:
        """Blocks that must be available for one more sequence with the same `num_tokens` tokens, once they are computed."""
        num_blocks, size = self._num_blocks_for(num_tokens), self._pool.block_size
        return sum(
            len(group.blocks_seen(num_tokens, num_blocks, size))
            if group.is_windowed
            else num_tokens % size > 0
            for group in self._pool.groups
        )

    def fork(self, num_tokens: int) -> "SequenceBlocks":
        """Another sequence's tables with the same `num_tokens` computed tokens. The caller has checked the room.

        Full blocks are shared; nobody writes to them any more. A partial last one is copied, since both go on in it.
        """
        tables = [self._fork_table(table, num_tokens // self._pool.block_size) for table in self.tables]
        return SequenceBlocks(self._pool, self._content, tables)

    # -- results

    def seal(self, num_computed_tokens: int, chain: TokenChain) -> None:
        """Checksums the blocks that have just become full, and publishes them."""
        num_full, num_named = num_computed_tokens // self._pool.block_size, len(chain.block_hashes)
        for table in self.tables:
            checksums = table.checksums
            for ordinal in range(len(checksums), num_full):
                block_id = table.block_ids[ordinal]
                checksums.append(0 if block_id is None else self._content.checksum(block_id))
                # After a collision the chain is broken: nothing behind it can be found, so nothing is published.
                if table.num_cached == ordinal < num_named:
                    self._publish(table, ordinal, chain)

    def trim(self, num_computed_tokens: int, num_tokens: int) -> None:
        """Lets go of what no token from `num_computed_tokens` on sees."""
        for table in self._windowed:
            self._trim(table, num_computed_tokens, num_tokens)
        if self._windowed:
            self._note_change()

    def release(self) -> None:
        """Gives up everything."""
        for table in self.tables:
            self._pool.release(table.held_ids)
            self._pledge(table, -table.pledged)
            table.clear()
        self.places = Places()
        self._note_change()

    # -- what is there

    def held_places(self) -> list[tuple[int, int, BlockId]]:
        """What is held: (group, ordinal, block)."""
        return [
            (table.index, ordinal, block_id)
            for table in self.tables
            for ordinal, block_id in enumerate(table.block_ids)
            if block_id is not None
        ]

    def block_at(self, group: int, ordinal: int) -> BlockId | None:
        """The block at a place; None where none is held."""
        block_ids = self.tables[group].block_ids
        return block_ids[ordinal] if ordinal < len(block_ids) else None

    @property
    def num_held(self) -> int:
        """Blocks, of all groups."""
        return sum(len(table.block_ids) - table.block_ids.count(None) for table in self.tables)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not any(table.block_ids for table in self.tables)

    def ready_places(self, num_known: int, *, is_complete: bool) -> tuple[ReadyBlock, ...]:
        """See Places.ready."""
        return self.places.ready(num_known, self._content.checksum, is_complete=is_complete)

    # -- one table

    def _need(self, table: GroupTable, seen: list[int], num_cached: int, max_step_tokens: int) -> int:
        """Blocks to set aside: those that are not cached or, for a window, all that it ever holds at once."""
        if not table.is_windowed:
            return len(seen) - num_cached
        return min(len(seen), table.group.max_live_blocks(max_step_tokens, self._pool.block_size))

    def _take_prefix(self, table: GroupTable, seen: list[int], prefix: CachedPrefix, need: int) -> None:
        cached = prefix.by_group[table.index]
        if table.is_windowed:
            self._pledge(table, need)
        ordinals = [ordinal for ordinal in seen if ordinal < prefix.num_blocks]
        table.block_ids = [None] * prefix.num_blocks
        for ordinal, block_id in zip(ordinals, self._pool.acquire(cached), strict=True):
            table.block_ids[ordinal] = block_id
        # Where the prefix ends unseen, the chain is made anew when blocks are sealed.
        if ordinals and ordinals[-1] == prefix.num_blocks - 1:
            checksums = {ordinal: block.checksum for ordinal, block in zip(ordinals, cached, strict=True)}
            table.checksums = [checksums.get(ordinal, 0) for ordinal in range(prefix.num_blocks)]
            table.last_cached, table.num_cached = cached[-1], prefix.num_blocks

    def _allocate(self, table: GroupTable, ordinals: Sequence[int], num_blocks: int) -> None:
        """Blocks at those ordinals that have none yet, in a table of `num_blocks`."""
        table.block_ids += [None] * (num_blocks - len(table.block_ids))
        empty = [ordinal for ordinal in ordinals if table.block_ids[ordinal] is None]
        for ordinal, block_id in zip(empty, self._pool.allocate(len(empty), table.index), strict=True):
            table.block_ids[ordinal] = block_id

    def _shortage(self, table: GroupTable, end: int) -> int:
        num_blocks = self._num_blocks_for(end)
        if not table.is_windowed:
            return max(0, num_blocks - len(table.block_ids))
        return max(0, table.num_live(num_blocks, self._pool.block_size) - table.pledged)

    def _trim(self, table: GroupTable, num_computed_tokens: int, num_tokens: int) -> None:
        size = self._pool.block_size
        first = table.group.view.first_visible(num_computed_tokens) // size
        begin = max(table.first, table.group.num_sink_blocks(size))
        behind = table.block_ids[begin:first]
        self._pool.release([block_id for block_id in behind if block_id is not None][::-1])
        table.block_ids[begin:first] = [None] * len(behind)
        table.first = max(first, table.first)
        # The known tokens need no more than this; growth asks again.
        needed = table.num_live(max(len(table.block_ids), self._num_blocks_for(num_tokens)), size)
        self._pledge(table, min(needed, table.pledged) - table.pledged)

    def _publish(self, table: GroupTable, ordinal: int, chain: TokenChain) -> None:
        block_id = table.block_ids[ordinal]
        size, block_hash = self._pool.block_size, chain.block_hashes[ordinal]
        token_ids = chain.token_ids[ordinal * size : (ordinal + 1) * size]
        if block_id is None:
            cached: CachedBlock | None = witness(
                table.index, block_hash, chain.root, table.last_cached, token_ids
            )
        else:
            parent, checksum = table.last_cached, table.checksums[ordinal]
            cached = self._pool.publish(
                block_id, block_hash, chain.root, parent, token_ids, checksum, table.index
            )
        if cached is not None:
            table.last_cached, table.num_cached = cached, ordinal + 1

    def _fork_table(self, table: GroupTable, num_full: int) -> GroupTable:
        assert len(table.checksums) == num_full, "what is full is sealed before it is shared"
        other = replace(
            table, block_ids=table.block_ids[:num_full], checksums=list(table.checksums), pledged=0
        )
        if table.is_windowed:
            self._pledge(other, table.pledged)
        self._pool.share(other.held_ids)
        for block_id in table.block_ids[num_full:]:
            assert block_id is not None, "the last block is seen by the next token"
            (copy,) = self._pool.allocate(1, table.index)
            self._content.copy(block_id, copy)
            other.block_ids.append(copy)
        return other

    def _pledge(self, table: GroupTable, num_blocks: int) -> None:
        self._pool.pledge(num_blocks)
        table.pledged += num_blocks

    # -- small things

    def _note_change(self) -> None:
        size = self._pool.block_size
        if self._only is not None:  # nearly always, and often: without detours
            block_ids = self._only.block_ids
            self.num_tokens_held, self.view = len(block_ids) * size, (tuple(block_ids),)
        else:
            self.num_tokens_held = min([len(table.block_ids) for table in self.tables]) * size
            self.view = tuple([tuple(table.block_ids) for table in self.tables])

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._pool.block_size)
