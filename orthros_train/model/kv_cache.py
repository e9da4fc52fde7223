"""KVCache: every position of the base stream, in every layer, rows of different lengths side by side.

* Left-aligned: row b occupies storage [0, lengths[b]); padding is never stored. What lies past a row's end is finite
  and undefined, and no query sees it.
* Preallocated where the length to come is known. Elsewhere there is room for ROOM_TO_DECODE tokens more, and storage
  grows by an eighth and as much room again, one layer at a time: no more than that is empty, and a token is copied at
  most eight times on average, while each decoding step reads them all.
* A forward that fails leaves the lengths as they were, and so does a prefill that fails in one of its chunks.
* A transformers `Cache`, so that `generate` can crop, reorder and repeat it.

Shapes: B rows, T new columns, G KV heads, d head size, S longest length.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from .configuration_orthros import OrthrosConfig

GRANULE = 64  # storage grows in multiples of this many positions
ROOM_TO_DECODE = 256  # positions beyond those needed where nobody said how many will be


def bytes_per_token(config: OrthrosConfig, dtype: torch.dtype) -> int:
    """Size of one position's keys and values in all layers."""
    _, kv_heads, head_dim = config.head_shape
    return config.num_hidden_layers * 2 * kv_heads * head_dim * dtype.itemsize


class KVCacheLayer(CacheLayerMixin):
    """One layer's storage: keys and values (B, G, capacity, d). Lengths are the cache's, one for all layers."""

    keys: Tensor  # set once is_initialized
    values: Tensor
    is_sliding = False
    is_croppable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Start with empty storage of the shape, dtype and device of `key_states` (B, G, any, d)."""
        self.keys, self.values = key_states[:, :, :0].clone(), value_states[:, :, :0].clone()
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions; what is stored stays."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not used: positions are known to the cache, which writes all rows."""
        raise NotImplementedError("write through KVCache.update, which knows the rows' lengths")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset of a mask over stored and new keys."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Allocated positions; what is in use is KVCache.lengths."""
        return self.keys.shape[2] if self.is_initialized else 0

    def get_max_length(self) -> int:
        """-1: grows without bound."""
        return -1

    def select_rows(self, rows: Tensor) -> None:
        """Keep or repeat the rows (B',) of the batch."""
        if self.is_initialized:
            self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)


class KVCache(Cache):
    """The base stream's keys and values of all layers.

    Args:
        config: the model's; gives the number of layers.
        capacity: positions to allocate at the first write, where known; 0: those written and `ROOM_TO_DECODE` more.
        dtype: storage dtype; None: that of the keys. Reads return the keys' dtype.

    Attributes:
        lengths: (B,) int64, tokens stored in each row; None before the first write.
        uniform_length: the length of every row where they are known to be equal, else None.
    """

    def __init__(self, config: OrthrosConfig, capacity: int = 0, dtype: torch.dtype | None = None) -> None:
        self.layers: list[KVCacheLayer]  # type: ignore[assignment]
        super().__init__(layers=[KVCacheLayer() for _ in range(config.num_hidden_layers)])
        self.dtype = dtype
        self.reset(capacity)

    def reset(self, capacity: int = 0) -> None:
        """Forget everything and free the storage."""
        for layer in self.layers:
            layer.__init__()  # type: ignore[misc]
        self.lengths: Tensor | None = None
        self.uniform_length: int | None = 0
        self._capacity = capacity
        self._columns = 0
        self._longest = 0
        # of an announced call: columns, longest length after it, counts, lengths before it
        self._pending: tuple[int, int, Tensor | None, Tensor] | None = None
        self._slots: tuple[Tensor, Tensor, Tensor] | None = None  # rows, columns, storage indices of a ragged write

    def reserve(self, tokens: int) -> None:
        """Expect `tokens` more of each row: the next write that lacks room makes it for all of them, and to decode."""
        if self._capacity < self._longest + tokens:
            self._capacity = self._longest + tokens + ROOM_TO_DECODE

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Calls that count together: if one fails, the lengths are those before the first."""
        names = ("lengths", "uniform_length", "_columns", "_longest")
        before = {name: getattr(self, name) for name in names}
        try:
            yield
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise

    def begin(self, batch_size: int, columns: int, counts: Tensor | None, device: torch.device) -> None:
        """Announce a call that writes `columns` tokens a row, or the first `counts` (B,) of them."""
        lengths = self.lengths
        if lengths is None:
            lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
            for layer in self.layers:
                if layer.is_initialized and layer.keys.shape[0] != batch_size:  # by a first call that failed
                    layer.__init__()  # type: ignore[misc]
        if lengths.shape[0] != batch_size:
            raise ValueError(f"the cache holds {lengths.shape[0]} rows but the input has {batch_size}")
        self._slots = None
        if counts is None and self.uniform_length is not None:
            longest = self.uniform_length + columns
        elif counts is None:
            longest = self._longest + columns
        else:
            longest = int((lengths + counts).max())
        self._pending = (columns, longest, counts, lengths)
        if counts is not None or self.uniform_length is None:
            grid = torch.arange(columns, device=device).expand(batch_size, columns)
            if counts is None:  # a decoding step: no waiting for a device's number of real tokens
                rows = torch.arange(batch_size, device=device)[:, None].expand_as(grid).flatten()
                source = grid.flatten()
            else:
                rows, source = (grid < counts[:, None]).nonzero(as_tuple=True)
            self._slots = (rows, source, lengths[rows] + source)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one layer's new keys and values (B, G, T, d); return all of them (B, G, S, d).

        Raises:
            RuntimeError: gradients are on; the cache is storage, not part of a graph.
        """
        if self._pending is None:
            raise RuntimeError("a KVCache is written by the model's forward, between begin and commit")
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise RuntimeError("a KVCache takes no gradients; run under torch.no_grad() or pass use_cache=False")
        layer = self.layers[layer_idx]
        columns, longest, _, _ = self._pending
        room = max(longest, 1)  # a batch of padding alone stores nothing, and its queries still read a key: a zero
        if not layer.is_initialized:
            layer.lazy_initialization(
                key_states.to(self.dtype or key_states.dtype), value_states.to(self.dtype or value_states.dtype)
            )
        if layer.keys.shape[2] < room:
            layer.grow(self._wanted(room, layer.keys.shape[2]))
        for stored, new in ((layer.keys, key_states), (layer.values, value_states)):
            if self._slots is None:
                stored[:, :, longest - columns : longest] = new
            else:
                rows, source, target = self._slots
                stored[rows, :, target] = new[rows, :, source].to(stored.dtype)
        return layer.keys[:, :, :room].to(key_states.dtype), layer.values[:, :, :room].to(value_states.dtype)

    def _wanted(self, room: int, present: int) -> int:
        """Positions to allocate where `room` are needed and there are `present`."""
        wanted = max(room, present * 9 // 8) + ROOM_TO_DECODE
        if self._capacity >= room:  # storage that has to be copied grows by its eighth all the same
            wanted = max(self._capacity, wanted if present else 0)
        return -(-wanted // GRANULE) * GRANULE

    def commit(self) -> None:
        """Count the tokens of the announced call as stored."""
        assert self._pending is not None
        columns, longest, counts, lengths = self._pending
        self.lengths = lengths + (columns if counts is None else counts)
        self.uniform_length = longest if counts is None and self.uniform_length is not None else None
        self._columns, self._longest, self._pending = self._columns + columns, longest, None

    def keys(self, layer: int) -> Tensor:
        """Stored keys of a layer, (B, G, longest length, d); past lengths[b] row b is undefined."""
        return self.layers[layer].keys[:, :, : self._longest]

    def values(self, layer: int) -> Tensor:
        """Stored values of a layer, (B, G, longest length, d); past lengths[b] row b is undefined."""
        return self.layers[layer].values[:, :, : self._longest]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Input columns consumed, padding included, as `generate` counts them."""
        return self._columns

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Key length and offset of a mask over consumed and new columns."""
        return self._columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -`tokens_to_remove` tokens of every row (a negative number or 0, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to remove, not {tokens_to_remove}")
        if tokens_to_remove == 0 or self.lengths is None:
            return
        self.lengths = (self.lengths + tokens_to_remove).clamp(min=0)
        self._columns = max(self._columns + tokens_to_remove, 0)
        self._longest = max(self._longest + tokens_to_remove, 0)
        if self.uniform_length is not None:
            self.uniform_length = self._longest

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, in that order; a row may be kept several times."""
        if self.lengths is None:
            return
        rows = indices.to(self.lengths.device)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        self.lengths = self.lengths.index_select(0, rows)
        for layer in self.layers:
            layer.select_rows(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times in a row, for several samples of one prompt."""
        if self.lengths is not None:
            rows = torch.arange(self.lengths.shape[0], device=self.lengths.device)
            self.batch_select_indices(rows.repeat_interleave(repeats))

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first write."""
        return -1 if self.lengths is None else self.lengths.shape[0]
