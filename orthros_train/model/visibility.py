"""Which keys a query sees: the one statement of the mask, and the blocks of queries that obey it cheaply.

A query at storage index p, in a segment whose first token is at storage index `first`, sees the keys

    { j : first <= j <= p  and  (no window, or j > p - w, or j < first + s) }

each once, with window w and s sinks.

Shapes: B batch, M queries, S keys of a block, c queries of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Queries of a block. A block of c under a window w computes (w + c)·c pairs of which w·c are visible, so a narrow
# window wants few; PyTorch's CPU kernel has tiles of 32 queries, and of 64 from 192 on, so a wide one wants that many.
MIN_BLOCK, MAX_BLOCK = 64, 192


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys that at least one of them sees.

    Attributes:
        queries: columns of the M queries.
        keys: one or two disjoint sets of keys (window span, sinks), each a slice common to all rows or indices (B, S).
        mask: (B or 1, 1, c, S) over the concatenated keys, 0 where visible and -inf elsewhere; None where every query
            sees every key.
    """

    queries: slice
    keys: list[slice | Tensor]
    mask: Tensor | None


@dataclass(frozen=True)
class Visibility:
    """The mask of one stream, as positions instead of a matrix.

    Attributes:
        positions: (B or 1, M) int64, storage index p of each query.
        first: (B or 1, M) int64, storage index of the first token of its segment.
        window: w, or None for the whole segment up to p.
        sinks: s, without effect where there is no window.
        contiguous_from: p of the first query where, in every row, the queries stand at consecutive positions of one
            segment that starts at storage index 0; None where that is not known. Such spans need no look at a tensor.
    """

    positions: Tensor
    first: Tensor
    window: int | None
    sinks: int
    contiguous_from: int | None = None

    def sees(self, queries: slice, keys: Tensor) -> Tensor:
        """Visible pairs: storage indices `keys` (B or 1, S) -> bool (B or 1, c, S)."""
        p, first, j = self.positions[:, queries, None], self.first[:, queries, None], keys[:, None]
        visible = (first <= j) & (j <= p)
        if self.window is not None:
            visible &= (j > p - self.window) | (j < first + self.sinks)
        return visible

    def is_plain_causal(self, key_count: int) -> bool:
        """Whether query i sees exactly the keys 0..i, and there are as many queries as keys."""
        return self.contiguous_from == 0 and self.is_causal_tail(key_count)

    def is_causal_tail(self, key_count: int) -> bool:
        """Whether the M queries stand at the last M of the keys, and each sees all keys up to its own."""
        queries = self.positions.shape[1]
        unwindowed = self.window is None or self.window >= key_count
        return self.contiguous_from is not None and self.contiguous_from + queries == key_count and unwindowed

    def blocks(self, key_count: int, dtype: torch.dtype) -> Iterator[Block]:
        """Blocks that together hold every query once, with masks of `dtype`; `key_count` keys are in storage."""
        c, count = self._block_size, self.positions.shape[1]
        for number, (lows, highs) in enumerate(self._spans):
            queries = slice(number * c, min((number + 1) * c, count))
            if self.contiguous_from is not None:
                yield self._contiguous_block(queries, lows[0], highs[0] + 1, dtype)
            else:
                yield self._scattered_block(queries, self._reach[0][number], lows, highs, key_count, dtype)

    @cached_property
    def _block_size(self) -> int:
        """c."""
        if self.window is None:
            return MAX_BLOCK
        if self.positions.device.type != "cpu":  # fewer launches
            return min(max(self.window, MIN_BLOCK), MAX_BLOCK)
        return MIN_BLOCK if self.window < 16 * MIN_BLOCK else MAX_BLOCK

    @cached_property
    def _spans(self) -> list[tuple[list[int], list[int]]]:
        """For each block, every row's first and last key within the window's reach (sinks apart)."""
        c, count = self._block_size, self.positions.shape[1]
        if self.contiguous_from is not None:
            start, stop = self.contiguous_from, self.contiguous_from + count
            reach = stop if self.window is None else self.window - 1
            return [([max(0, p - reach)], [min(p + c, stop) - 1]) for p in range(start, stop, c)]
        lows, highs = self._reach
        return list(zip(lows.tolist(), highs.tolist(), strict=True))

    @cached_property
    def _reach(self) -> tuple[Tensor, Tensor]:
        """`_spans` where rows differ, as (blocks, B) each: looked at once, since a GPU would wait for every look."""
        low = self.first if self.window is None else torch.maximum(self.first, self.positions - self.window + 1)
        lows = [part.amin(1) for part in low.split(self._block_size, dim=1)]
        highs = [part.amax(1) for part in self.positions.split(self._block_size, dim=1)]
        return torch.stack(lows), torch.stack(highs)

    @cached_property
    def _masks(self) -> dict[tuple[int, int, int, torch.dtype], Tensor]:
        """Masks of the blocks past the first window: all alike but for the last, in every layer."""
        return {}

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """What another kernel than sdpa makes of the mask, by the shape that it made it for: once for all layers."""
        return {}

    def _contiguous_block(self, queries: slice, low: int, stop: int, dtype: torch.dtype) -> Block:
        sinks = self.sinks if self.window is not None else 0
        if low <= sinks:  # the span reaches the sinks: one run of keys
            low, sinks = 0, 0
        keys: list[slice | Tensor] = [slice(0, sinks), slice(low, stop)] if sinks else [slice(low, stop)]
        if queries.stop - queries.start == 1:
            return Block(queries, keys, None)
        shape = (queries.stop - queries.start, stop - low, sinks, dtype)
        mask = self._masks.get(shape) if low else None
        if mask is None:
            device = self.positions.device
            indices = torch.cat([torch.arange(part.start, part.stop, device=device) for part in keys])  # type: ignore[union-attr]
            mask = _additive(self.sees(queries, indices[None]), dtype)
        if low:
            self._masks[shape] = mask
        return Block(queries, keys, mask)

    def _scattered_block(
        self, queries: slice, low: Tensor, lows: list[int], highs: list[int], key_count: int, dtype: torch.dtype
    ) -> Block:
        """Rows differ. A common slice where their spans overlap well, else each row's own indices; `low` is `lows`."""
        device = self.positions.device
        start, stop = min(lows), max(highs) + 1
        span = max(high - low for low, high in zip(lows, highs, strict=True)) + 1
        low = low[:, None]  # (B, 1)
        keys: list[slice | Tensor]
        if stop - start <= 2 * span:
            low = low.new_full((1, 1), start)
            indices = torch.arange(start, stop, device=device)[None]  # (1, S)
            keys = [slice(start, stop)]
        else:
            indices = low + torch.arange(span, device=device)  # (B, S); past a row's own end nothing is visible
            keys = [indices.clamp(max=key_count - 1)]
        mask = self.sees(queries, indices)  # (B, c, S)
        if self.window is not None and self.sinks:
            # A query whose sinks lie before the span shares its segment with the block's first query: that segment
            # starts before the span and reaches into it, and segments do not interleave.
            count = min(self.sinks, key_count)
            sinks = self.first[:, queries.start, None] + torch.arange(count, device=device)  # (B, s)
            before_span = (sinks < low)[:, None]  # (B, 1, s)
            mask = torch.cat((self.sees(queries, sinks) & before_span, mask), dim=-1)
            keys = [sinks.clamp(max=key_count - 1), *keys]
        return Block(queries, keys, _additive(mask, dtype))


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """bool (B or 1, c, S) -> (B or 1, 1, c, S) of `dtype`: 0 where visible, -inf elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))[:, None]
