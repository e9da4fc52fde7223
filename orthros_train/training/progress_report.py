"""What a person sees while training: a live line on a terminal, plain lines elsewhere (rank 0)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from orthros_train.training.metrics import Record

LONGEST_SECONDS = 10**9  # that a line shows as left


class ProgressReport:
    """Prints one line every `interval_steps` steps and keeps a live bar below them on a terminal."""

    def __init__(self, steps: int, first_step: int, interval_steps: int, shown: bool) -> None:
        self._steps, self._interval, self._shown = steps, interval_steps, shown
        self._console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if shown and self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("training", total=steps, completed=first_step)

    def start(self) -> None:
        """Show the bar; until then nothing has to be taken away if the run cannot begin."""
        if self._bar is not None:
            self._bar.start()

    def say(self, text: str) -> None:
        """Print a line, above the bar."""
        if self._shown:
            self._console.print(text, markup=False)

    def warn(self, text: str) -> None:
        """Print a warning line."""
        self.say(f"warning: {text}")

    def step(self, record: Record) -> None:
        """Report a step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], description=f"loss {_number(record['loss'], '.4f')}")
        due = record["step"] % self._interval == 0 or record["step"] == self._steps
        if due or "validation_loss" in record or "suites" in record:
            self.say(describe_step(record, self._steps))
        if record.get("suites"):
            self.say(f"step {record['step']}/{self._steps} | {describe_suites(record['suites'])}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away inside the block, where something else shows how far it is."""
        if self._bar is not None:
            self._bar.stop()
        try:
            yield
        finally:
            if self._bar is not None:
                self._bar.start()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def describe_step(record: Record, steps: int) -> str:
    """One line about a step."""
    remaining = timedelta(seconds=min(round((steps - record["step"]) * record["step_seconds"]), LONGEST_SECONDS))
    parts = [
        f"step {record['step']}/{steps}",
        f"loss {_number(record['loss'], '.4f')}",
        f"lr {record['learning_rate']:.3g}",
        f"grad norm {_number(record['grad_norm'], '.3f')}",
        f"{record['tokens_per_second']:,.0f} tokens/s",
    ]
    if record["mfu_exact"] is not None:
        parts.append(f"MFU {record['mfu_exact']:.1%}")
    if record["skipped_steps"]:
        parts.append(f"skipped {record['skipped_steps']}")
    if record["step"] < steps:
        parts.append(f"{remaining} left")
    if "validation_loss" in record:
        parts.append(f"validation loss {_number(record['validation_loss'], '.4f')}")
    return " | ".join(parts)


def describe_suites(scores: Mapping[str, float | None]) -> str:
    """The means of suites, and the tasks of suites that have none."""
    means = {name.partition("/")[0]: name for name in scores if name.endswith("/mean")}
    shown = dict.fromkeys(means.get(name.partition("/")[0], name) for name in scores)
    return " | ".join(f"{name} {_number(scores[name], '.4f')}" for name in shown)


def _number(value: Any, pattern: str) -> str:
    return "none" if value is None else format(value, pattern)
