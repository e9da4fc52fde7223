"""Conversations and pretraining text in one run, blended by weight.

* Which kind a sample is, is a pure function of its index, as everything else about it. Inside a step the conversations
  come first, so almost every micro-batch is of one kind, whatever its size and the number of ranks.
* A micro-batch (over all ranks) that holds pretraining text has an output token at every position; one of
  conversations alone has them where answers are predicted (see `output_slots`).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from orthros_train.data.blend import Blend
from orthros_train.data.pretraining import PretrainingData, Sample
from orthros_train.data.samples import Samples
from orthros_train.data.sft import SFTData


class MixedData:
    """Samples of two data sets.

    Args:
        conversations: the first.
        text: the second.
        weights: of the two; they need not sum to one.
        global_batch_size: samples of a step, inside which conversations come first.

    Attributes:
        conversations: the first data set.
        fingerprint: SHA-256 of all that decides which tokens sample i holds.
        epoch_sizes: of the sources of both.
    """

    def __init__(
        self, conversations: SFTData, text: PretrainingData, weights: tuple[float, float], global_batch_size: int
    ) -> None:
        self.conversations = conversations
        self._parts: tuple[Samples, Samples] = (conversations, text)
        self._blend, self._step_size = Blend(weights), global_batch_size
        self.epoch_sizes = conversations.epoch_sizes + text.epoch_sizes
        identity = [conversations.fingerprint, text.fingerprint, str(self._blend.shares), str(global_batch_size)]
        self.fingerprint = hashlib.sha256("/".join(identity).encode()).hexdigest()
        self._step = lru_cache(maxsize=16)(self._ordered_step)

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0 of the endless order."""
        part, number = self.place(index)
        return self._parts[part].sample(number)

    def output_count(self, index: int) -> int | None:
        """Output positions of sample `index`; None: every position."""
        part, number = self.place(index)
        return self._parts[part].output_count(number)

    def place(self, index: int) -> tuple[int, int]:
        """(0 for conversations or 1 for text, index in that data set) of sample `index`."""
        step, slot = divmod(index, self._step_size)
        return self._step(step)[slot]

    def _ordered_step(self, step: int) -> list[tuple[int, int]]:
        return sorted(self._blend[index] for index in range(step * self._step_size, (step + 1) * self._step_size))
