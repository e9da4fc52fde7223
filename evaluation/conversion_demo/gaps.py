"""How far a converted model is from its source, position by position, before and after an adaptation."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.conversion_demo.arms import SOURCE

EDGES = (0, 128, 256, 512, 1024)  # of the position ranges in tables; the last range is what findings speak of
BEFORE, AFTER = "before", "after"


@dataclass(frozen=True)
class Gap:
    """Mean NLL of an arm less that of the source, article by article on the same tokens.

    Attributes:
        mean: nats per token.
        error: standard error of the mean over articles.
    """

    mean: float
    error: float


def ranges() -> list[tuple[int, int]]:
    """The position ranges [start, stop) of EDGES."""
    return list(itertools.pairwise(EDGES))


def mean_nll_between(nll: Sequence[Sequence[float]], start: int, stop: int) -> float:
    """Mean over articles and positions [start, stop) of NLL [article][position]."""
    return statistics.fmean(value for row in nll for value in row[start:stop])


def gap(results: dict[str, Any], arm: str, when: str, start: int, stop: int) -> Gap:
    """The arm against the source as it was at the same time: untrained, or adapted on the same batches."""
    pairs = zip(results["nll"][when][arm], results["nll"][when][SOURCE.name], strict=True)
    differences = [statistics.fmean(a - b for a, b in zip(x[start:stop], y[start:stop], strict=True)) for x, y in pairs]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    return Gap(statistics.fmean(differences), error)


def share_closed(before: Gap, after: Gap) -> float | None:
    """Which part of the gap before is gone after; 1 is all of it. None where two errors hide the gap before."""
    return 1 - after.mean / before.mean if before.mean > 2 * before.error else None
