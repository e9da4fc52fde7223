"""Validation during training: the exact token-weighted mean loss over a fixed set of samples."""

from __future__ import annotations

from collections.abc import Callable

from orthros_train.config import Config
from orthros_train.data.output_slots import output_slots
from orthros_train.data.samples import Samples
from orthros_train.training.batches import count_valid, split_evenly
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.stopping import StopRequests


def validate(
    engine: TrainingEngine, data: Samples, config: Config, stop: StopRequests, beat: Callable[[], None]
) -> tuple[float | None, str | None]:
    """Mean loss over all valid labels of the first `evaluation.samples` validation samples, whatever the layout.

    A validation set that has fewer is taken once. Collective. Returns (loss, None), or (None, reason) if the ranks
    agreed to stop before it was finished. Without any valid label the loss is NaN. `beat` is called at every batch.
    """
    ranks, mesh = engine.ranks, engine.mesh
    losses, labels = 0.0, 0
    size = config.train.micro_batch_size
    count = min(config.evaluation.samples, sum(data.epoch_sizes))
    slots = output_slots(data, range(count), config.data.output_positions_multiple, config.train.sequence_length)
    for batch in split_evenly(data, count, size, mesh, slots):
        beat()
        reason = stop.agreed(ranks)
        if reason is not None:
            return None, reason
        losses += engine.loss_sum(batch)
        labels += count_valid(batch)
    total, count = ranks.gather([losses, labels] if mesh.speaks else [0, 0]).sum(dim=0).tolist()
    return (total / count if count else float("nan")), None
