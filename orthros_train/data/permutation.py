"""A keyed permutation of 0 … size-1 in constant memory.

* A Feistel network permutes the bits of k; values outside the range are walked on until one falls
  inside (cycle walking; at most two rounds of the network on average), which keeps it a bijection.
* Any element is reached without the ones before it: resuming at sample 10^9 costs what sample 0
  costs, and no rank holds an index of the corpus.
* Only integer arithmetic and SHA-512: the order is the same on every machine and library version,
  which NumPy does not promise of its own shuffles.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_MASK = 0xFFFF_FFFF_FFFF_FFFF


def _mix(x: int) -> int:
    """Scatter 64 bits (the finalizer of SplitMix64: Steele, Lea and Flood, 2014)."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


class Permutation:
    """A bijection of `range(size)`, drawn by `key`; `permutation[k]` is its k-th value.

    Raises:
        ValueError: `size` is not positive.
    """

    def __init__(self, size: int, key: str) -> None:
        if size < 1:
            raise ValueError(f"a permutation needs at least one element, not {size}")
        self.size = size
        bits = (size - 1).bit_length()
        self._right_bits = bits - bits // 2
        self._left_mask = (1 << bits // 2) - 1
        self._right_mask = (1 << self._right_bits) - 1
        self._keys: tuple[int, ...] = struct.unpack(f"<{_ROUNDS}Q", hashlib.sha512(key.encode()).digest())

    def __getitem__(self, k: int) -> int:
        if not 0 <= k < self.size:
            raise IndexError(f"{k} is outside a permutation of {self.size}")
        value = self._network(k)
        while value >= self.size:
            value = self._network(value)
        return value

    def _network(self, k: int) -> int:
        left, right = k >> self._right_bits, k & self._right_mask
        for i in range(0, _ROUNDS, 2):
            left ^= _mix((right + self._keys[i]) & _MASK) & self._left_mask
            right ^= _mix((left + self._keys[i + 1]) & _MASK) & self._right_mask
        return left << self._right_bits | right


def shuffled(size: int, key: str) -> NDArray[np.int64]:
    """0 … size-1 in an order drawn by `key`, all at once: fast where the whole is needed anyway."""
    return np.random.RandomState(seed32(key)).permutation(size).astype(np.int64)


def seed32(key: str) -> int:
    """A seed for NumPy's RandomState, whose shuffles are frozen, from any text."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little")
