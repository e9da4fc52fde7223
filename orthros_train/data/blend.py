"""Which source the n-th sample comes from: an exact blend as a pure function of the index.

* The weights become integer shares of a repeating block, so any index is answered at once.
* Inside a block the sources take turns such that after any number of samples each has had its
  weight's worth to within one sample: the fairest order there is (Pfair scheduling, Baruah et al.
  1996: the earliest deadline first meets every deadline on one processor).
* Weights whose ratio needs more than `MAX_BLOCK` parts are rounded to that many.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

MAX_BLOCK = 100_000


def integer_shares(weights: Sequence[float]) -> list[int]:
    """The smallest positive integers in the ratio of `weights`, summing to at most `MAX_BLOCK`.

    Weights are read as the decimals that they print as: 0.7 and 0.3 become 7 and 3. Where the exact ratio needs
    a longer block, shares are rounded by largest remainder and no source gets none.
    """
    fractions = [Fraction(str(weight)) for weight in weights]
    total = sum(fractions)
    parts = [fraction / total for fraction in fractions]
    block = math.lcm(*(part.denominator for part in parts))
    if block > MAX_BLOCK:
        shares = [max(1, math.floor(part * MAX_BLOCK)) for part in parts]
        missing = MAX_BLOCK - sum(shares)
        order = sorted(range(len(parts)), key=lambda s: shares[s] - parts[s] * MAX_BLOCK)
        for source in order[: max(missing, 0)]:
            shares[source] += 1
        shares[shares.index(max(shares))] += min(missing, 0)
    else:
        shares = [int(part * block) for part in parts]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def schedule(shares: Sequence[int]) -> NDArray[np.int32]:
    """Order one block of sum(shares) slots.

    Slot k of source s may be used from floor(k / rate) on and must be used before ceil((k+1) / rate), where
    rate = shares[s] / block; among the sources that may be used, the earliest deadline goes first.

    Returns:
        (block,) int32, the source of each slot; source s appears shares[s] times, and at most one sample early or late.
    """
    block = sum(shares)
    order = np.empty(block, dtype=np.int32)
    used = [0] * len(shares)
    waiting = [(0, source) for source in range(len(shares))]  # (first slot that may be used, source)
    ready: list[tuple[int, int]] = []  # (deadline, source)
    for slot in range(block):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(used[source] + 1) * block // shares[source]), source))
        source = heapq.heappop(ready)[1]
        order[slot] = source
        used[source] += 1
        heapq.heappush(waiting, (used[source] * block // shares[source], source))
    return order


class Blend:
    """Maps a global sample index to (source, how many samples of that source came before).

    Args:
        weights: one positive weight a source; they need not sum to one.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self.shares = integer_shares(weights)
        self.block = sum(self.shares)
        self._order = schedule(self.shares)
        self._rank = np.empty(self.block, dtype=np.int32)
        for source, share in enumerate(self.shares):
            self._rank[self._order == source] = np.arange(share, dtype=np.int32)

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index < 0:
            raise IndexError(f"sample index {index} is negative")
        blocks, slot = divmod(index, self.block)
        source = int(self._order[slot])
        return source, blocks * self.shares[source] + int(self._rank[slot])
