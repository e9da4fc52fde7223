"""M, the number of output tokens a row, of each micro-batch of a step: known to every rank without talking.

M is one number for all conversations of an optimizer step: the most output positions of any row of the global batch,
rounded up to a multiple. It is a pure function of the sample plan, so ranks and pipeline stages agree on shapes.
"""

from __future__ import annotations

from collections.abc import Sequence

from orthros_train.data.sampler import batch_indices
from orthros_train.data.samples import Samples


def output_slots(data: Samples, indices: Sequence[int], multiple: int, sequence_length: int) -> int | None:
    """M of a batch of these samples, at most `sequence_length`; None: an output token at every position."""
    counts = [data.output_count(index) for index in indices]
    if None in counts:
        return None
    most = max(count for count in counts if count is not None)
    return min(-(-most // multiple) * multiple, sequence_length)


def step_output_slots(
    data: Samples,
    step: int,
    *,
    global_batch_size: int,
    samples_per_pass: int,
    multiple: int,
    sequence_length: int,
    same_in_step: bool,
) -> list[int | None]:
    """M of each accumulation pass of 0-based `step`.

    Args:
        data: the samples.
        step: 0-based.
        global_batch_size: samples of the step.
        samples_per_pass: micro-batch size times data-parallel ranks.
        multiple: that M is rounded up to.
        sequence_length: T, the largest M.
        same_in_step: one M for all passes (pipeline stages cannot change shapes inside a step), so a step with any
            pretraining text has an output token at every position.
    """
    batch = batch_indices(step, global_batch_size)
    counted = [index for index in batch if data.output_count(index) is not None]
    passes = [batch[first : first + samples_per_pass] for first in range(0, global_batch_size, samples_per_pass)]
    if same_in_step:
        return [output_slots(data, batch, multiple, sequence_length)] * len(passes)
    most = output_slots(data, counted, multiple, sequence_length) if counted else None
    return [None if output_slots(data, part, multiple, sequence_length) is None else most for part in passes]
