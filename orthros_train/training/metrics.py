"""What is recorded of every step: metrics.jsonl and TensorBoard events.

A step's record is an object of plain numbers and a host's name; null where a figure does not exist (loss and gradient
norm of a skipped step, MFU on a device whose peak is unknown). `forward_seconds_*` are the least, median and most
seconds that ranks spent in their own forward passes, `slowest_rank` and `slowest_host` who took most beside its own
pipeline stage. Where benchmark suites were scored, `suites` maps SUITE/TASK/METRIC and SUITE/mean to the scores. On
resume, the records past the checkpoint are cut, and so is a last line that a kill left unfinished.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from orthros_train.data.storage import write_text_atomically
from orthros_train.errors import InputError

Record = dict[str, Any]
TENSORBOARD_TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "skipped_steps": "train/skipped_steps",
    "validation_loss": "validation/loss",
    "tokens_per_second": "speed/tokens_per_second",
    "data_wait_seconds": "speed/data_wait_seconds",
    "forward_seconds_min": "ranks/forward_seconds_min",
    "forward_seconds_median": "ranks/forward_seconds_median",
    "forward_seconds_max": "ranks/forward_seconds_max",
    "slowest_rank": "ranks/slowest_rank",
    "mfu_exact": "speed/mfu_exact",
    "mfu_palm": "speed/mfu_palm",
    "memory_peak_gib": "memory/peak_gib",
}


class MetricsLog:
    """The two logs of one attempt (rank 0)."""

    def __init__(self, file: Path, last_step: int, tensorboard: bool) -> None:
        """Cut `file` behind `last_step` and append from there; the last record kept is `self.last`."""
        records = [record for record in read_metrics(file) if record["step"] <= last_step]
        self.last: Record | None = records[-1] if records else None
        self._file = file
        self._write_all(records)
        self._stream = open(file, "a", encoding="utf-8")  # noqa: SIM115  closed by close
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415  slow to import

            self._board = SummaryWriter(str(file.parent / "tensorboard"), purge_step=last_step + 1)

    def append(self, record: Record) -> None:
        """Record one step."""
        self._stream.write(json.dumps(record, allow_nan=False) + "\n")
        self._stream.flush()
        self.last = record
        self._show(record)

    def amend(self, **late: Any) -> Record:
        """Add figures to the last record, e.g. of a validation that a stop had cut short, and return it."""
        assert self.last is not None
        self._stream.close()
        records = read_metrics(self._file)
        records[-1] = {**self.last, **late}
        self._write_all(records)
        self._stream = open(self._file, "a", encoding="utf-8")  # noqa: SIM115  closed by close
        self.last = records[-1]
        self._show({"step": self.last["step"], **late})
        return self.last

    def sync(self) -> None:
        """Have the records on disk before the checkpoint that they lead to."""
        os.fsync(self._stream.fileno())

    def close(self) -> None:
        """Flush and close both logs."""
        self._stream.close()
        if self._board is not None:
            self._board.close()

    def _write_all(self, records: Sequence[Record]) -> None:
        write_text_atomically(self._file, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

    def _show(self, record: Record) -> None:
        if self._board is None:
            return
        for key, tag in TENSORBOARD_TAGS.items():
            if record.get(key) is not None:
                self._board.add_scalar(tag, record[key], record["step"])
        for tag, value in record.get("suites", {}).items():
            if value is not None:
                self._board.add_scalar(tag, value, record["step"])
        self._board.flush()


def read_metrics(file: Path) -> list[Record]:
    """The complete records of a metrics.jsonl; none if there is no such file.

    Raises:
        InputError: a line is no record.
    """
    if not file.exists():
        return []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline was never finished
        records = [json.loads(line) for line in lines]
        if not all(isinstance(record["step"], int) for record in records):
            raise TypeError
    except (OSError, ValueError, TypeError, KeyError):
        raise InputError(f"{file} is damaged; restore it from a copy or remove it, the checkpoints are apart") from None
    return records


def finite_or_none(value: float) -> float | None:
    """`value` for JSON, which has no NaN and no infinity."""
    return value if math.isfinite(value) else None


def memory_peak_gib(device: torch.device) -> float:
    """Most memory this process has held so far: allocated on its GPU, or resident where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_resident_bytes() / 2**30


def peak_resident_bytes() -> int:
    """Most memory that this process has had resident so far.

    Linux's ru_maxrss would start from the size of the process that forked this one.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        (line,) = [line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return highest if sys.platform == "darwin" else highest * 1024
