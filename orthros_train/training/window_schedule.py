"""The base window as a pure function of the step: wide at first, so that little changes, and narrower by halves.

A conversion with the window at its full width is the source model; narrowing it in stages lets the base stream's layers
follow. Stages are few, since a compiled kernel is compiled anew for each window.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from orthros_train.config_adaptation import AdaptationSection
from orthros_train.model import OrthrosConfig


def scheduled_window(adaptation: AdaptationSection, final: int | None, step: int) -> int | None:
    """Base window of update `step` (1-based).

    Without `start_window` it is `final`, always. Else start_window, its half, its quarter, … down to the last one above
    `final` take equal parts of the first window_steps updates, and `final` the rest.
    """
    start, steps = adaptation.start_window, adaptation.window_steps
    if start is None or steps is None or final is None or step > steps:
        return final
    stages = [start]
    while stages[-1] // 2 > final:
        stages.append(stages[-1] // 2)
    return stages[(step - 1) * len(stages) // steps]


@contextmanager
def base_window(config: OrthrosConfig, window: int | None) -> Iterator[None]:
    """Let the models that have this configuration attend through `window` inside the block."""
    usual = config.base_window
    config.base_window = window
    try:
        yield
    finally:
        config.base_window = usual
