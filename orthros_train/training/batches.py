"""The batches of this rank's replica, prepared ahead in a thread.

A step's batch is a pure function of (step, replica), so there is nothing to save and nothing to rewind: the loader
starts at whatever step the checkpoint holds.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from orthros_train.config import Config
from orthros_train.data import collate, rank_micro_batches
from orthros_train.data.output_slots import step_output_slots
from orthros_train.data.samples import Samples
from orthros_train.parallel.mesh import Mesh

IGNORED_LABEL = -100
POLL_SECONDS = 0.1
Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class StepBatch:
    """One replica's share of one optimizer step."""

    micro_batches: list[Batch] = field(repr=False)
    valid_labels: int
    segment_lengths: list[int] = field(repr=False)  # of all segments of all rows
    output_columns: list[int] | None = field(default=None, repr=False)  # of all output tokens, see `output_columns`


class BatchLoader:
    """Hands out the batch of each step from `first_step` on, up to `data.prefetch_steps` ahead.

    A stage in the middle of a pipeline gets empty ones. An exception in the thread is raised by the next `take`.
    """

    def __init__(self, data: Samples, config: Config, mesh: Mesh, first_step: int) -> None:
        self._data, self._config, self._train, self._mesh = data, config, config.train, mesh
        self._pin = torch.cuda.is_available()
        self._next = first_step
        self._closed = threading.Event()
        self._queue: queue.Queue[StepBatch | BaseException] | None = None
        if config.data.prefetch_steps > 0:
            self._queue = queue.Queue(maxsize=config.data.prefetch_steps)
            self._thread = threading.Thread(target=self._fill, args=(first_step,), name="batches", daemon=True)
            self._thread.start()

    def take(self, give_up: Callable[[], bool]) -> tuple[StepBatch | None, float]:
        """The next step's batch and the seconds spent waiting for it; None once `give_up` says to wait no longer."""
        started = time.perf_counter()
        if self._queue is None:
            batch: StepBatch | None = self._build(self._next)
        else:
            batch = self._wait(self._queue, give_up)
        self._next += 1
        return batch, time.perf_counter() - started

    @staticmethod
    def _wait(ready: queue.Queue[StepBatch | BaseException], give_up: Callable[[], bool]) -> StepBatch | None:
        while True:
            try:
                item = ready.get(timeout=POLL_SECONDS)
            except queue.Empty:
                if give_up():
                    return None
                continue
            if isinstance(item, BaseException):
                raise item
            return item

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        if self._queue is not None:
            self._thread.join(timeout=2)  # a daemon: one stuck in a read does not hold up the end

    def _fill(self, step: int) -> None:
        while not self._closed.is_set():
            try:
                item: StepBatch | BaseException = self._build(step)
            except BaseException as error:  # handed to the training thread, which raises it
                item = error
            self._put(item)
            if isinstance(item, BaseException):
                return
            step += 1

    def _put(self, item: StepBatch | BaseException) -> None:
        assert self._queue is not None
        while not self._closed.is_set():
            try:
                return self._queue.put(item, timeout=POLL_SECONDS)
            except queue.Full:
                continue

    def _build(self, step: int) -> StepBatch:
        """`step` is 0-based here, as in the data's own order."""
        train, mesh = self._train, self._mesh
        if not mesh.reads_data:
            return StepBatch([], valid_labels=0, segment_lengths=[])
        plan = rank_micro_batches(step, train.global_batch_size, train.micro_batch_size, mesh.data_rank, mesh.data_size)
        slots = self._output_slots(step)
        batches = [collate([self._data.sample(i) for i in indices], m) for indices, m in zip(plan, slots, strict=True)]
        if self._pin:
            batches = [{key: value.pin_memory() for key, value in batch.items()} for batch in batches]
        return StepBatch(
            micro_batches=batches,
            valid_labels=sum(count_valid(batch) for batch in batches),
            segment_lengths=[length for batch in batches for length in segment_lengths(batch)],
            output_columns=output_columns(batches),
        )

    def _output_slots(self, step: int) -> list[int | None]:
        return step_output_slots(
            self._data,
            step,
            global_batch_size=self._train.global_batch_size,
            samples_per_pass=self._train.micro_batch_size * self._mesh.data_size,
            multiple=self._config.data.output_positions_multiple,
            sequence_length=self._train.sequence_length,
            same_in_step=self._mesh.pipeline_size > 1,
        )


def count_valid(batch: Batch) -> int:
    """Labels of a micro-batch that carry loss."""
    return int((batch["shift_labels"] != IGNORED_LABEL).sum())


def segment_lengths(batch: Batch) -> list[int]:
    """Lengths of the segments of all rows (B, T); without document_ids a row is one segment."""
    rows, tokens = batch["input_ids"].shape
    if "document_ids" not in batch:
        return [tokens] * rows
    lengths = []
    for row in batch["document_ids"]:
        changes = (torch.nonzero(row[1:] != row[:-1]).flatten() + 1).tolist()
        lengths += [end - start for start, end in pairwise([0, *changes, tokens])]
    return lengths


def output_columns(batches: Sequence[Batch]) -> list[int] | None:
    """Columns of all output tokens, with the rows of all micro-batches joined into one; None: one at every column.

    A slot without a label is computed all the same. It reads one key, as the first token of its row does.
    """
    if not any("output_positions" in batch for batch in batches):
        return None
    columns: list[int] = []
    before = 0
    for batch in batches:
        rows, tokens = batch["input_ids"].shape
        everywhere = torch.arange(tokens).expand(rows, tokens)
        positions = batch.get("output_positions", everywhere).clamp(min=0)  # (B, M)
        columns += (positions + before + tokens * torch.arange(rows)[:, None]).flatten().tolist()
        before += rows * tokens
    return columns


def split_evenly(
    data: Samples, count: int, micro_batch_size: int, mesh: Mesh, output_slots: int | None = None
) -> Iterator[Batch]:
    """This replica's batches of the first `count` samples, each sample on exactly one replica.

    Every replica gets the same number of equally shaped batches, since ZeRO-3 gathers weights in every forward: where
    samples run out, sample 0 stands in with all its labels ignored.
    """
    per_round = micro_batch_size * mesh.data_size
    for first in range(0, count, per_round):
        start = first + mesh.data_rank * micro_batch_size
        indices = range(start, start + micro_batch_size)
        batch = collate([data.sample(index if index < count else 0) for index in indices], output_slots)
        unused = torch.tensor([index >= count for index in indices])
        batch["shift_labels"] = batch["shift_labels"].masked_fill(unused[:, None], IGNORED_LABEL)
        yield batch
