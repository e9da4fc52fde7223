"""Where the time of a call goes: its largest kernels on a GPU, its largest operators on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evaluation.benchmarking.result import print_table

SHOWN = 10


def largest_kernels(call: Callable[[], object], device: str, count: int = SHOWN) -> list[dict[str, Any]]:
    """The `count` kernels (CPU: operators, without what they call) that take most time in one call, after a warm-up.

    Each with its name, calls, milliseconds, and share of the time of all kernels.
    """
    import torch  # noqa: PLC0415
    from torch.autograd import DeviceType  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    gpu = device.startswith("cuda")
    call()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        call()
        if gpu:
            torch.cuda.synchronize(device)
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    found = [
        (event.key, event.count, (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e3)
        for event in profiler.key_averages()
        if event.device_type == wanted
    ]
    total = sum(milliseconds for *_, milliseconds in found)
    found.sort(key=lambda entry: -entry[2])
    return [
        {"name": name, "calls": calls, "milliseconds": milliseconds, "share": milliseconds / total}
        for name, calls, milliseconds in found[:count]
    ]


def print_kernels(case: str, kernels: list[dict[str, Any]]) -> None:
    """The table of one case."""
    rows = [[k["name"][:90], f"{k['calls']:,}", f"{k['milliseconds']:.3f}", f"{k['share']:.1%}"] for k in kernels]
    print_table(f"{case}: largest kernels of one call", ["kernel", "calls", "ms", "share"], rows)
