"""What training asks of a data set: an endless order of samples, each a pure function of its index."""

from __future__ import annotations

from typing import Protocol

from orthros_train.data.pretraining import Sample


class Samples(Protocol):
    """Samples of one split.

    Attributes:
        epoch_sizes: samples that one epoch of each source has.
        fingerprint: SHA-256 of all that decides which tokens sample i holds.
    """

    epoch_sizes: tuple[int, ...]
    fingerprint: str

    def sample(self, index: int) -> Sample:
        """The sample at `index` >= 0 of the order."""
        ...

    def output_count(self, index: int) -> int | None:
        """Its output positions, known without reading it; None: every position."""
        ...
