"""Which tiles of queries meet which splits of their contexts in one pass, and in which calls.

A context is cut into splits counted from its first token. A split that a token may not see is hidden from it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.core.kv_layout import View
from paceline.engine.exact.partial import CHUNK_TILE_TOKENS, Geometry, agreeing_items, fill_rows
from paceline.engine.exact.rungs import cover
from paceline.engine.forward_batch import ForwardBatch, QueryRange


@dataclass(frozen=True, slots=True)
class Call:
    """Items of work that are computed at once: each is a tile and one of its splits.

    In the first `num_whole` of them every token of the tile sees every token of the split.
    """

    tile: Tensor  # [num_items]
    ordinal: Tensor  # [num_items], which of its tile's items it is
    blocks: Tensor  # [num_items, split_tokens // block_size]; 0 stands for those that there are not
    num_whole: int
    hidden: Tensor  # [the other items, 1, rows, split_tokens], True where the token of a row may not look
    unseen: Tensor  # [the other items, 1, split_tokens, 1], True where no token of the tile may look


@dataclass(frozen=True, slots=True)
class Plan:
    """The tiles of one height, and what is to be done. A tile that is not full repeats its last token."""

    rows: Tensor  # [num_tiles, tile_tokens], rows of the batch
    max_items: int  # that a tile has
    calls: tuple[Call, ...]

    @property
    def tile_tokens(self) -> int:
        """Its height."""
        return self.rows.shape[1]


@dataclass(frozen=True, slots=True)
class _Item:
    tile: int
    ordinal: int
    first_key: int
    seen_from: int  # the positions [seen_from, seen_to) that any token of the tile may see
    seen_to: int
    is_whole: bool
    blocks: Tensor


def make_plans(batch: ForwardBatch, geometry: Geometry, kv_group: int, view: View) -> tuple[Plan, ...]:
    """One for the decodes and one for the chunks, where there are any."""
    decodes = [part for part in batch.queries if part.last - part.first == 1]
    chunks = [part for part in batch.queries if part.last - part.first > 1]
    groups = ((decodes, 1), (chunks, CHUNK_TILE_TOKENS))
    return tuple(_make_plan(parts, height, geometry, kv_group, view) for parts, height in groups if parts)


def _make_plan(parts: list[QueryRange], height: int, geometry: Geometry, kv_group: int, view: View) -> Plan:
    rows: list[Tensor] = []
    positions: list[Tensor] = []
    items: list[_Item] = []
    for part in parts:
        start = part.context - (part.last - part.first)
        splits = _splits_of(part.block_tables[kv_group], geometry)
        for first in range(start, part.context, height):
            last = min(first + height, part.context) - 1
            items += _items_of(len(rows), first, last, splits, geometry, view)
            positions.append(torch.arange(first, first + height).clamp(max=last))
            rows.append(positions[-1] - start + part.first)
    # Whole ones first: in a call, the others stand together at its end.
    items.sort(key=lambda item: not item.is_whole)
    rungs = agreeing_items(geometry, height, torch.get_num_threads())
    row_positions = fill_rows(torch.stack(positions).repeat_interleave(geometry.group, 1), axis=1)
    calls = tuple(
        _make_call(_repeat_last(items[first:last], size), row_positions, geometry, view)
        for first, last, size in cover(len(items), rungs)
    )
    return Plan(torch.stack(rows), max(item.ordinal for item in items) + 1, calls)


def _splits_of(block_table: Tensor, geometry: Geometry) -> Tensor:
    """As [num_splits, blocks of a split]."""
    num_blocks = geometry.split_tokens // geometry.block_size
    return functional.pad(block_table, (0, -len(block_table) % num_blocks)).view(-1, num_blocks)


def _items_of(
    tile: int, first: int, last: int, splits: Tensor, geometry: Geometry, view: View
) -> list[_Item]:
    """Those of the tile whose tokens stand at positions first to last."""
    size = geometry.split_tokens
    seen_from, all_see_from = view.first_visible(first), view.first_visible(last)
    num_sink_splits = -(-view.num_kept(seen_from) // size)
    splits_seen = [
        *range(min(num_sink_splits, seen_from // size)),
        *range(seen_from // size, last // size + 1),
    ]
    return [
        _Item(
            tile=tile,
            ordinal=ordinal,
            first_key=split * size,
            seen_from=seen_from,
            seen_to=last + 1,
            is_whole=(all_see_from <= split * size or (split + 1) * size <= view.num_sink_tokens)
            and (split + 1) * size <= first + 1,
            blocks=splits[split],
        )
        for ordinal, split in enumerate(splits_seen)
    ]


def _make_call(items: list[_Item], row_positions: Tensor, geometry: Geometry, view: View) -> Call:
    tile = torch.tensor([item.tile for item in items])
    num_whole = sum(item.is_whole for item in items)
    edges = items[num_whole:]
    first_keys = torch.tensor([item.first_key for item in edges], dtype=torch.long)
    keys = first_keys.unsqueeze(1) + torch.arange(geometry.split_tokens)
    distance = row_positions[tile[num_whole:]].unsqueeze(2) - keys.unsqueeze(1)
    is_sink = keys < view.num_sink_tokens
    hidden = distance < 0
    if view.window is not None:
        hidden |= (distance >= view.window) & ~is_sink.unsqueeze(1)
    seen = torch.tensor([(item.seen_from, item.seen_to) for item in edges], dtype=torch.long).view(-1, 2)
    return Call(
        tile=tile,
        ordinal=torch.tensor([item.ordinal for item in items]),
        blocks=torch.stack([item.blocks for item in items]),
        num_whole=num_whole,
        hidden=hidden.unsqueeze(1),
        unseen=(((keys < seen[:, :1]) & ~is_sink) | (keys >= seen[:, 1:]))[:, None, :, None],
    )


def _repeat_last(items: list[_Item], size: int) -> list[_Item]:
    """Fills a call up; what is computed twice is stored twice, with the same bits."""
    return items + items[-1:] * (size - len(items))
