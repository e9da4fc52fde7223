"""What a measurement ran on, to be written beside its figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory and the versions that matter."""
    from orthros_train.training.run_folder import git_commit, installed_versions  # noqa: PLC0415 (imports torch)

    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {"Python": platform.python_version(), **installed_versions()},
        "commit": git_commit(),
    }


def load_average() -> float | None:
    """Processes that ran or waited to run in the last minute, ours included; None where the system does not say."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
