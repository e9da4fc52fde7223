"""Paired bootstrap: how sure is a difference of two models that answered the same documents?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000
SEED = 1234
CONFIDENCE = 0.95

Pair = Sequence[float]  # a document's (value, count)


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
        total += _resampled(delta, lambda picked: picked.mean(axis=1), rng) / len(tasks)
    return _difference(value, total)


def ratio_difference(first: Sequence[Pair], second: Sequence[Pair]) -> Difference:
    """Difference of Σ values / Σ counts over documents (value, count) that both have, in the same order."""
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)  # (documents, 2)
    both = np.stack([a, b], axis=1)  # (documents, 2, 2): the run, then value and count
    resamples = _resampled(both, _second_minus_first, np.random.default_rng(SEED))
    return _difference(float(_second_minus_first(both)), resamples)


def resampled_ratios(items: Sequence[Pair]) -> NDArray[np.float64]:
    """Σ values / Σ counts of documents (value, count) in each resample."""
    return _resampled(np.asarray(items, dtype=np.float64), _ratios, np.random.default_rng(SEED))


def _ratios(pairs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Σ values / Σ counts of (..., documents, 2)."""
    sums = pairs.sum(axis=-2)
    ratios: NDArray[np.float64] = sums[..., 0] / sums[..., 1]
    return ratios


def _second_minus_first(both: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the ratios of (..., documents, 2, 2)."""
    return _ratios(both[..., 1, :]) - _ratios(both[..., 0, :])


def _resampled(
    documents: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    rng: np.random.Generator,
) -> NDArray[np.float64]:
    """A statistic of each resample of the first axis; it is given 100 at a time, so that memory stays small."""
    count = len(documents)
    return np.concatenate(
        [statistic(documents[rng.integers(count, size=(100, count))]) for _ in range(0, RESAMPLES, 100)]
    )


def _difference(value: float, resamples: NDArray[np.float64]) -> Difference:
    low, high = np.quantile(resamples, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    probability = float((resamples > 0).mean() + (resamples == 0).mean() / 2)
    return Difference(value, float(low), float(high), probability)
