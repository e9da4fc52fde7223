"""Paired bootstrap: how sure is a difference of two models that answered the same documents?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
SEED = 1234
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """Second minus first.

    Attributes:
        value: of the means.
        low: end of the 95% interval.
        high: end of the 95% interval.
        probability: share of the resamples in which the second is above the first, ties counting half.
    """

    value: float
    low: float
    high: float
    probability: float

    @property
    def is_clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Difference of the means over documents that both answered, in the same order."""
    return mean_difference([(first, second)])


def mean_difference(tasks: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Difference:
    """Difference of a suite's mean: each task's documents are resampled on their own, tasks weigh the same."""
    rng = np.random.default_rng(SEED)
    total: NDArray[np.float64] = np.zeros(RESAMPLES)
    value = 0.0
    for first, second in tasks:
        delta = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
        value += float(delta.mean()) / len(tasks)
        for start in range(0, RESAMPLES, 100):  # by hundreds: memory stays small with many documents
            picks = rng.integers(len(delta), size=(100, len(delta)))
            total[start : start + 100] += delta[picks].mean(axis=1) / len(tasks)
    low, high = np.quantile(total, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    probability = float((total > 0).mean() + (total == 0).mean() / 2)
    return Difference(value, float(low), float(high), probability)
