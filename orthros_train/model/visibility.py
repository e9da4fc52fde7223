"""Which keys a query sees: the one statement of the mask, and the blocks of queries that obey it cheaply.

A query at storage index p, in a segment whose first token is at storage index `first`, sees the keys

    { j : first <= j <= p  and  (no window, or j > p - w, or j < first + s) }

each once, with window w and s sinks.

Shapes: B batch, M queries, S keys of a block, c queries of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

MIN_BLOCK, MAX_BLOCK = 64, 128  # queries of a block: enough for a good GEMM, few enough for the processor's cache


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys that at least one of them sees.

    Attributes:
        queries: columns of the M queries.
        keys: one or two disjoint sets of keys (window span, sinks), each a slice common to all rows or indices (B, S).
        mask: bool (B or 1, 1, c, S) over the concatenated keys; None where every query sees every key.
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
        queries = self.positions.shape[1]
        unwindowed = self.window is None or self.window >= queries
        return self.contiguous_from == 0 and queries == key_count and unwindowed

    def blocks(self, key_count: int) -> Iterator[Block]:
        """Blocks that together hold every query once; `key_count` is the number of keys in storage."""
        for start, (lows, highs) in zip(range(0, self.positions.shape[1], self._block_size), self._spans, strict=True):
            queries = slice(start, min(start + self._block_size, self.positions.shape[1]))
            if self.contiguous_from is not None:
                yield self._contiguous_block(queries, lows[0], highs[0] + 1)
            else:
                yield self._scattered_block(queries, lows, highs, key_count)

    @cached_property
    def _block_size(self) -> int:
        """c: about as wide as the window, so that a block wastes little of its span."""
        return MAX_BLOCK if self.window is None else min(max(self.window, MIN_BLOCK), MAX_BLOCK)

    @cached_property
    def _spans(self) -> list[tuple[list[int], list[int]]]:
        """For each block, every row's first and last key within the window's reach (sinks apart)."""
        c, count = self._block_size, self.positions.shape[1]
        if self.contiguous_from is not None:
            start, stop = self.contiguous_from, self.contiguous_from + count
            reach = stop if self.window is None else self.window - 1
            return [([max(0, p - reach)], [min(p + c, stop) - 1]) for p in range(start, stop, c)]
        low = self.first if self.window is None else torch.maximum(self.first, self.positions - self.window + 1)
        lows = [part.amin(1) for part in low.split(c, dim=1)]
        highs = [part.amax(1) for part in self.positions.split(c, dim=1)]
        return list(zip(torch.stack(lows).tolist(), torch.stack(highs).tolist(), strict=True))

    def _contiguous_block(self, queries: slice, low: int, stop: int) -> Block:
        sinks = self.sinks if self.window is not None else 0
        if low <= sinks:  # the span reaches the sinks: one run of keys
            low, sinks = 0, 0
        keys: list[slice | Tensor] = [slice(0, sinks), slice(low, stop)] if sinks else [slice(low, stop)]
        if queries.stop - queries.start == 1:
            return Block(queries, keys, None)
        device = self.positions.device
        indices = torch.cat([torch.arange(part.start, part.stop, device=device) for part in keys])  # type: ignore[union-attr]
        return Block(queries, keys, self.sees(queries, indices[None])[:, None])

    def _scattered_block(self, queries: slice, lows: list[int], highs: list[int], key_count: int) -> Block:
        """Rows differ. A common slice where their spans overlap well, else each row's own indices."""
        device = self.positions.device
        start, stop = min(lows), max(highs) + 1
        span = max(high - low for low, high in zip(lows, highs, strict=True)) + 1
        low = torch.tensor(lows, device=device)[:, None]  # (B, 1)
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
        return Block(queries, keys, mask[:, None])
