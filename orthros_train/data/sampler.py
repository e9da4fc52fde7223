"""Which samples a step, a rank and a micro-batch take: pure functions of the step.

Step s takes the global indices s·G … s·G+G-1 (G the global batch). Accumulation step m of rank r takes
a run of micro_batch_size of them, ranks side by side. So the samples of a step, and their order over
the run, depend on neither the number of ranks nor the micro-batch size nor the number of steps.
"""

from __future__ import annotations

from orthros_train.errors import InputError


def batch_indices(step: int, global_batch_size: int) -> range:
    """Global sample indices of 0-based `step`."""
    return range(step * global_batch_size, (step + 1) * global_batch_size)


def rank_micro_batches(
    step: int, global_batch_size: int, micro_batch_size: int, rank: int, world_size: int
) -> list[list[int]]:
    """Sample indices of one data-parallel rank at 0-based `step`, one list a micro-batch.

    Raises:
        InputError: the global batch is no multiple of micro_batch_size times the number of data-parallel ranks.
    """
    per_pass = micro_batch_size * world_size
    if global_batch_size % per_pass:
        raise InputError(
            f"train.global_batch_size {global_batch_size} is not a multiple of train.micro_batch_size "
            f"{micro_batch_size} times {world_size} data-parallel ranks; set it to a multiple of {per_pass}"
        )
    batch = batch_indices(step, global_batch_size)
    offsets = range(rank * micro_batch_size, global_batch_size, per_pass)
    return [list(batch[offset : offset + micro_batch_size]) for offset in offsets]
