"""Which row the n-th sample is: over any number of sources and epochs, a pure function of the index.

index -> blend -> (source, n-th of that source) -> (epoch, k) -> permutation(key, source, epoch)[k] -> row
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from orthros_train.data.blend import Blend
from orthros_train.data.permutation import Permutation


class SampleOrder:
    """Each epoch of a source visits each of its rows once, in an order of its own.

    Args:
        weights: of the sources; they need not sum to one.
        epoch_sizes: rows of each source, at least 1.
        key: draws the order.
    """

    def __init__(self, weights: Sequence[float], epoch_sizes: Sequence[int], key: str) -> None:
        self._blend = Blend(weights)
        self._sizes, self._key = tuple(epoch_sizes), key

    @property
    def shares(self) -> list[int]:
        """The weights as whole numbers."""
        return self._blend.shares

    def __getitem__(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, row of the source) of sample `index` >= 0."""
        source, count = self._blend[index]
        epoch, k = divmod(count, self._sizes[source])
        return source, epoch, _epoch_order(self._sizes[source], f"{self._key}/{source}/{epoch}")[k]


@lru_cache(maxsize=1024)
def _epoch_order(size: int, key: str) -> Permutation:
    return Permutation(size, key)
