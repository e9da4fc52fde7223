"""Which keys a query sees: the one statement of the mask, and the blocks of queries that obey it cheaply.

A query at storage index p, in a segment whose first token is at storage index `first`, sees the keys

    { j : first <= j <= p  and  (no window, or j > p - w, or j < first + s) }

each once, with window w and s sinks.

Shapes: B batch, M queries, S keys of a block, c queries of a block.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Queries of a block. A block of c under a window w computes (w + c)·c pairs of which w·c are visible, so a narrow
# window wants few; PyTorch's CPU kernel has tiles of 32 queries, and of 64 from 192 on, so a wide one wants that many.
MIN_BLOCK, MAX_BLOCK = 64, 192
FOLDED_ON = ("cuda",)  # devices where blocks that differ only in their place are one call: launches cost more than keys
KEPT_BYTES = 256 << 20  # of finished blocks, which all layers and the backward share; more are built again each time


@dataclass(frozen=True)
class Block:
    """Consecutive queries and the keys that at least one of them sees, or several such blocks that are alike.

    Attributes:
        queries: columns of the M queries.
        keys: one or two disjoint sets of keys (sinks, window span), each a slice common to all rows or indices (B, S).
        mask: (B or 1, 1, c, S) over the concatenated keys, 0 where visible and -inf elsewhere; None where every query
            sees every key.
        repeats: n blocks of c queries, one after the other, that have this mask. `keys` are the first one's slices;
            each next block has the same sinks and a span that lies c keys further.
    """

    queries: slice
    keys: list[slice | Tensor]
    mask: Tensor | None
    repeats: int = 1

    @property
    def step(self) -> int:
        """c."""
        return (self.queries.stop - self.queries.start) // self.repeats

    @property
    def key_count(self) -> int:
        """S."""
        return sum(part.stop - part.start if isinstance(part, slice) else part.shape[1] for part in self.keys)

    def parts(self, most: int) -> Iterator["Block"]:
        """The same blocks, at most `most` of them together."""
        if self.repeats <= most:
            yield self
            return
        *sinks, span = self.keys
        assert isinstance(span, slice)
        for start in range(0, self.repeats, most):
            repeats, shift = min(most, self.repeats - start), start * self.step
            first = self.queries.start + shift
            moved = slice(span.start + shift, span.stop + shift)
            yield Block(slice(first, first + repeats * self.step), [*sinks, moved], self.mask, repeats)


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

    def blocks(self, key_count: int, dtype: torch.dtype) -> Iterable[Block]:
        """Blocks that together hold every query once, with masks of `dtype`; `key_count` keys are in storage.

        They are kept for the next layer and for the backward, up to KEPT_BYTES.
        """
        return self._finished.get((key_count, dtype)) or self._build(key_count, dtype)

    @cached_property
    def _finished(self) -> dict[tuple[int, torch.dtype], list[Block]]:
        return {}

    def _build(self, key_count: int, dtype: torch.dtype) -> Iterator[Block]:
        made: list[Block] | None = None if (key_count, dtype) in self._too_large else []
        counted: set[int] = set()  # masks and indices by identity: blocks share some
        held = 0
        contiguous = self.contiguous_from is not None
        for block in self._contiguous_blocks(dtype) if contiguous else self._scattered_blocks(key_count, dtype):
            yield block
            if made is None:
                continue
            made.append(block)
            for part in (block.mask, *block.keys):
                if isinstance(part, Tensor) and id(part) not in counted:
                    counted.add(id(part))
                    held += part.nbytes
            if held > KEPT_BYTES:
                made = None
                self._too_large.add((key_count, dtype))
        if made is not None:
            self._finished[key_count, dtype] = made

    @cached_property
    def _too_large(self) -> set[tuple[int, torch.dtype]]:
        """Of which masks more than KEPT_BYTES are needed, so that the next layer gathers none."""
        return set()

    @cached_property
    def _block_size(self) -> int:
        """c."""
        if self.window is None:
            return MAX_BLOCK
        if self.positions.device.type != "cpu":  # fewer launches
            return min(max(self.window, MIN_BLOCK), MAX_BLOCK)
        return MIN_BLOCK if self.window < 16 * MIN_BLOCK else MAX_BLOCK

    @cached_property
    def _reach(self) -> tuple[Tensor, list[tuple[list[int], list[int]]]]:
        """For each block, every row's first and last key within the window's reach (sinks apart).

        The first ones as (blocks, B), too; looked at together, since a GPU would wait for every look.
        """
        low = self.first if self.window is None else torch.maximum(self.first, self.positions - self.window + 1)
        lows = torch.stack([part.amin(1) for part in low.split(self._block_size, dim=1)])
        highs = torch.stack([part.amax(1) for part in self.positions.split(self._block_size, dim=1)])
        looked = torch.stack((lows, highs)).tolist()
        return lows, list(zip(*looked, strict=True))

    @cached_property
    def prepared(self) -> dict[Any, Any]:
        """What another kernel than sdpa makes of the mask, by the shape that it made it for: once for all layers."""
        return {}

    def _contiguous_blocks(self, dtype: torch.dtype) -> Iterator[Block]:
        """Rows alike. Full blocks past the first window differ in their place alone, so that they share one mask."""
        assert self.contiguous_from is not None
        c, count = self._block_size, self.positions.shape[1]
        shared: dict[tuple[int, int], Tensor | None] = {}
        start = 0
        while start < count:
            rows, p = min(c, count - start), self.contiguous_from + start
            low = 0 if self.window is None else max(0, p - self.window + 1)
            sinks = self.sinks if self.window is not None and low > self.sinks else 0
            low = low if low > self.sinks else 0  # else the span reaches the sinks: one run of keys
            span = slice(low, p + rows)
            keys: list[slice | Tensor] = [slice(0, sinks), span] if sinks else [span]
            shape = (rows, span.stop - low)
            mask = shared[shape] if low and shape in shared else self._contiguous_mask(start, rows, low, sinks, dtype)
            if low:
                shared[shape] = mask
            repeats = max(1, (count - start) // c) if low and self.positions.device.type in FOLDED_ON else 1
            yield Block(slice(start, start + repeats * rows), keys, mask, repeats)
            start += repeats * rows

    def _contiguous_mask(self, start: int, rows: int, low: int, sinks: int, dtype: torch.dtype) -> Tensor | None:
        """Of the queries start..start+rows-1 over the first `sinks` keys and those from `low` up to the last query."""
        assert self.contiguous_from is not None
        if rows == 1:
            return None
        device, stop = self.positions.device, self.contiguous_from + start + rows
        indices = torch.cat((torch.arange(sinks, device=device), torch.arange(low, stop, device=device)))
        return _additive(self.sees(slice(start, start + rows), indices[None]), dtype)

    def _scattered_blocks(self, key_count: int, dtype: torch.dtype) -> Iterator[Block]:
        c, count = self._block_size, self.positions.shape[1]
        low_tensors, spans = self._reach
        for number, (lows, highs) in enumerate(spans):
            queries = slice(number * c, min((number + 1) * c, count))
            yield self._scattered_block(queries, low_tensors[number], lows, highs, key_count, dtype)

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
