"""How much memory a piece of work needs at most, measured in a process of its own."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from orthros_train.errors import InputError

MIB = 2**20


def memory_growth_mib(work: Callable[[], object], device: str = "cpu") -> float:
    """MiB by which this process grew at most while `work` ran, beyond what it held before.

    On a GPU, of what the allocator handed out. On CPU, of resident memory; where Linux does not let the record of the
    highest size be reset, what the process held once before `work` may hide growth up to that size.
    """
    import psutil  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from orthros_train.training.metrics import peak_resident_bytes  # noqa: PLC0415

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc gives free memory back, into which the work would grow unseen
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # sets VmHWM to the present size
    before = psutil.Process().memory_info().rss
    work()
    return max(peak_resident_bytes() - before, 0) / MIB


def in_own_process(command: Sequence[str], what: str) -> Any:
    """Run Python with the arguments `command`; what it printed as JSON in its last line.

    What this process has freed of a GPU's memory goes back first: torch would keep it, and the other process lack it.

    Raises:
        InputError: it failed; its last words, and `what` it was to measure.
    """
    import torch  # noqa: PLC0415

    gc.collect()  # models in reference cycles
    torch.cuda.empty_cache()  # nothing where CUDA was not used
    outcome = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=os.environ.copy()
    )
    if outcome.returncode:
        reason = next((line for line in reversed(outcome.stderr.splitlines()) if line.strip()), "killed")
        raise InputError(f"{what} cannot be measured: exit code {outcome.returncode}, {reason.removeprefix('error: ')}")
    return json.loads(outcome.stdout.splitlines()[-1])


def add_peaks(records: Sequence[dict[str, Any]], command_of: Callable[[Mapping[str, Any]], Sequence[str]]) -> list[str]:
    """Measure the peak memory of each record's case in a process of its own, `peak_growth_mib`.

    Where that fails, it is None with a `peak_memory_problem`: the times are there already, and stay.

    Args:
        records: those of a benchmark; they are extended.
        command_of: from a record to the arguments of the Python that prints the MiB.

    Returns:
        The problems, one a line.
    """
    problems = []
    for record in records:
        try:
            record["peak_growth_mib"] = in_own_process(command_of(record), f"the peak memory of {record['case']}")
        except InputError as error:
            record |= {"peak_growth_mib": None, "peak_memory_problem": str(error)}
            problems.append(f"LEFT OUT: {error}")
    return problems
