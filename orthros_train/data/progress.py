"""Progress of a long job on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

PLAIN_INTERVAL_SECONDS = 10.0


class Progress:
    """Shows how much of `total` is done.

    Args:
        label: the job, as the line begins.
        total: what `update`'s `done` reaches at the end.
        shown: false on ranks that leave it to another one.
    """

    def __init__(self, label: str, total: int, shown: bool = True) -> None:
        self._label, self._total, self._shown = label, max(total, 1), shown
        self._last_line = time.monotonic()
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        if shown and sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, TextColumn("{task.fields[detail]}"), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(label, total=self._total, detail="")

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, detail: str) -> None:
        """Report that `done` of the total is done; `detail` says more in words."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, detail=detail)
        elif self._shown and time.monotonic() - self._last_line >= PLAIN_INTERVAL_SECONDS:
            self._last_line = time.monotonic()
            print(f"{self._label}: {100 * done / self._total:.0f}%, {detail}", file=sys.stderr, flush=True)
