"""Why and when a run stops early.

Handlers only set a flag; the ranks agree on it at the next step boundary (and between validation batches), so all save
the same step. Causes: SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) on any rank, the wall-clock limit, and a file
`stop_requested` in the run folder, which launchers write instead of signalling (torchrun dies on SIGUSR1). What the
file says is added to the reason: a launcher's begins with "launcher: " and has the cause; a person's may be empty. A
second Ctrl-C ends the process at once.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from orthros_train.launch_protocol import STOP_FILE
from orthros_train.training.ranks import Ranks

FLAG = "orthros_train/stop"
REASONS = ("none", "SIGTERM", "SIGUSR1", "SIGINT", "the wall-clock limit", f"the file {STOP_FILE}")
_SIGNAL_CODES = {signal.SIGTERM: 1, signal.SIGUSR1: 2, signal.SIGINT: 3}
_WALL_CLOCK_CODE, _FILE_CODE = 4, 5
_LONGEST_TEXT = 200


class StopRequests:
    """Collects this rank's reasons to stop. Rank 0 alone watches the file."""

    def __init__(self, started: float, wall_clock_limit_seconds: float | None) -> None:
        self._signal_code = 0  # set by a handler, at any moment
        self._code = 0
        self._deadline = None if wall_clock_limit_seconds is None else started + wall_clock_limit_seconds
        self._file: Path | None = None

    def watch_folder(self, folder: Path) -> None:
        """Look for the stop file in `folder` from now on; one left over from before this process is removed."""
        self._file = folder / STOP_FILE
        if self._file.exists() and self._file.stat().st_mtime < psutil.Process().create_time():
            self._file.unlink(missing_ok=True)

    def consume(self) -> None:
        """Remove the stop file, so that the next attempt goes on."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def explain(self, reason: str) -> str:
        """The agreed reason with what the stop file says, where it is the file; before `consume`."""
        if reason != REASONS[_FILE_CODE] or self._file is None:
            return reason
        try:
            text = " ".join(self._file.read_text(encoding="utf-8", errors="replace").split())[:_LONGEST_TEXT]
        except OSError:  # somebody has removed it again
            text = ""
        return f"{reason} ({text})" if text else reason

    def code(self) -> int:
        """This rank's reason as an index into REASONS; 0 means go on. A reason once given stays."""
        self._code = self._code or self._signal_code or self._other_code()
        return self._code

    def _other_code(self) -> int:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return _WALL_CLOCK_CODE
        if self._file is not None and self._file.exists():
            return _FILE_CODE
        return 0

    def agreed(self, ranks: Ranks) -> str | None:
        """The reason of the lowest rank that has one, the same on all ranks; None means go on."""
        return describe(ranks.gather([self.code()])[:, 0].tolist())

    def heard(self, ranks: Ranks) -> bool:
        """Whether this rank has a reason to stop, or another has said so here. Not collective: ranks that work apart,
        each at its own pace, call it when they like and then meet to agree."""
        if self.code():
            ranks.raise_flag(FLAG)
            return True
        return ranks.flag_raised(FLAG)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turn signals into stop requests inside the block. One that the process was told to ignore stays ignored."""

        def note(number: int, frame: FrameType | None) -> None:
            self._signal_code = _SIGNAL_CODES[signal.Signals(number)]
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)  # the second one is meant at once

        handled = [number for number in _SIGNAL_CODES if signal.getsignal(number) != signal.SIG_IGN]
        previous = {number: signal.signal(number, note) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def describe(codes: list[float]) -> str | None:
    """The reason in words of the lowest rank whose code is not 0, or None."""
    for rank, code in enumerate(codes):
        if code:
            return f"{REASONS[int(code)]} on rank {rank}" if int(code) < _WALL_CLOCK_CODE else REASONS[int(code)]
    return None
