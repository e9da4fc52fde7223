"""Which rank slows the others down.

Ranks leave a step together, so its time says nothing about who was late. What a rank spends in its own forward passes
does: they wait for no other replica. Under tensor parallelism the ranks of a group share their time, so the group's
node is found; under a pipeline, ranks are compared with those of the same stage. Under ZeRO-3 a pass waits for all
replicas, whenever it gathers a layer's weights, and takes equally long everywhere: there the clock runs only inside
the layers that have weights, whose weights are there when they begin.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

WINDOW_STEPS = 20
SLOW_FACTOR = 1.5  # times the usual forward time of a stage's ranks
LEAST_EXCESS_SECONDS = 0.05  # a step; what is less does not matter, and may be noise


def timed_modules(model: nn.Module, gathers_weights: bool) -> list[nn.Module]:
    """Modules whose forward passes are a rank's own: the model; if it gathers weights on its way, what they belong to.

    Args:
        model: with DeepSpeed's hooks, which gather before later hooks see a module begin.
        gathers_weights: under ZeRO-3.
    """
    if not gathers_weights:
        return [model]
    return [each for each in model.modules() if not list(each.children()) and list(each.parameters())]


class ForwardClock:
    """Seconds that modules, none inside another, have spent in forward passes of training."""

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._started: Any = None
        self._passes: list[tuple[Any, Any]] = []
        for module in modules:
            module.register_forward_pre_hook(self._begin)
            module.register_forward_hook(self._end)

    def take(self) -> float:
        """The seconds since the last call; on a GPU it waits for the last pass."""
        passes, self._passes = self._passes, []
        if not self._cuda:
            return float(sum(end - start for start, end in passes))
        if passes:
            passes[-1][1].synchronize()
        return sum(start.elapsed_time(end) for start, end in passes) / 1000

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._started = self._moment() if module.training else None

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if self._started is not None:
            self._passes.append((self._started, self._moment()))

    def _moment(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class Stragglers:
    """Compares the forward times of all ranks over the last WINDOW_STEPS steps.

    Args:
        hosts: of each rank.
        stages: pipeline stage of each rank.
    """

    def __init__(self, hosts: Sequence[str], stages: Sequence[int]) -> None:
        self._hosts, self._stages = hosts, stages
        self._window: deque[list[float]] = deque(maxlen=WINDOW_STEPS)

    def add(self, forward_seconds: Sequence[float]) -> None:
        """Note a step: the seconds of each rank."""
        self._window.append(list(forward_seconds))

    def slowest(self, forward_seconds: Sequence[float]) -> int:
        """The rank that takes most beyond what is usual in its stage."""
        beyond = [own - self._usual(forward_seconds, rank) for rank, own in enumerate(forward_seconds)]
        return beyond.index(max(beyond))

    def describe(self) -> str | None:
        """The slow ranks in words, and forget the window; None if there is none, or the window is not full yet."""
        if len(self._window) < WINDOW_STEPS:
            return None
        seconds = [statistics.median(column) for column in zip(*self._window, strict=True)]
        self._window.clear()
        slow = []
        for rank, own in enumerate(seconds):
            usual = self._usual(seconds, rank)
            if own > SLOW_FACTOR * usual and own - usual > LEAST_EXCESS_SECONDS:
                slow.append(f"rank {rank} on {self._hosts[rank]} ({own:.2f} s a step, usual are {usual:.2f} s)")
        return f"slow in its own forward passes: {', '.join(slow)}" if slow else None

    def _usual(self, seconds: Sequence[float], rank: int) -> float:
        """The median of the rank's stage."""
        of_stage = [other for other, stage in zip(seconds, self._stages, strict=True) if stage == self._stages[rank]]
        return statistics.median_low(of_stage)
