"""Is there room for the checkpoints of a run? Asked before its first step, not found out at its first save."""

from __future__ import annotations

import shutil
from pathlib import Path

from orthros_train.config import Config
from orthros_train.errors import InputError

MASTER_AND_MOMENTS_BYTES = 12  # per parameter: fp32 master weight and two fp32 Adam moments
OVERHEAD = 1.01  # headers, tokenizer, manifest


def checkpoint_bytes(parameters: int) -> int:
    """Estimated size of one checkpoint of a model with this many parameters."""
    return int(parameters * MASTER_AND_MOMENTS_BYTES * OVERHEAD) + 2**20


def check_disk_space(folder: Path, config: Config, parameters: int, first_step: int, existing: int) -> None:
    """Raise InputError if the checkpoints still to come do not fit.

    Up to `keep_last` stay and one more is being written; those that exist already take no further room.
    """
    size = checkpoint_bytes(parameters)
    count = max(1, min(saves_to_come(config, first_step), config.checkpoint.keep_last + 1 - existing))
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < count * size:
        raise InputError(
            f"{folder} needs about {count * size / 2**30:.2f} GiB for {count} checkpoint{'s' * (count > 1)} of "
            f"{size / 2**30:.2f} GiB, but {place} has {free / 2**30:.2f} GiB free: make room, choose another "
            "output_dir, or lower checkpoint.keep_last"
        )


def saves_to_come(config: Config, first_step: int) -> int:
    """Checkpoints that a run continuing after `first_step` steps will write: the periodic ones and the last."""
    interval, steps = config.checkpoint.interval_steps, config.train.steps
    if interval is None:
        return 1
    periodic = steps // interval - first_step // interval
    return periodic + (steps % interval != 0)
