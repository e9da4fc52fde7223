"""A watchdog over a rank that falls silent: it prints where every thread of the process stands.

A run that hangs shows nothing. Every rank has a watchdog of its own; when one rank is stuck, the others soon wait for
it in a collective, so all of them report, and the one whose stack is not in a collective is the one to look at.

* It only reports, once a silence, and changes nothing: a long save or a slow disk may well be silent and sound.
* A report is written in one piece, so those of many ranks do not mix, to stderr and to a file of the rank.
* It reads Python's stacks from a thread of its own, which runs while others wait in collectives, on disks or for the
  GPU. Native code that neither returns nor lets go of the interpreter would silence it, too.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class _Beat:
    moment: float  # of time.monotonic
    doing: str


class Watchdog:
    """Reports after `silence_seconds` without a `beat`; watches inside a `with` block.

    Args:
        silence_seconds: longer than the longest sound step, validation batch or save.
        rank: of this process.
        file: reports are appended to it, too; its folder is made when the first is written.
    """

    def __init__(self, silence_seconds: float, rank: int, file: Path | None = None) -> None:
        self._silence_seconds, self._rank, self._file = silence_seconds, rank, file
        self._last = _Beat(time.monotonic(), "starting")
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def beat(self, doing: str) -> None:
        """A sign of life, and what comes next, such as "step 12" or "validation after step 10"; costs a microsecond."""
        self._last = _Beat(time.monotonic(), doing)

    def __enter__(self) -> Self:
        self.beat(self._last.doing)
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        reported: _Beat | None = None
        due = self._last.moment + self._silence_seconds
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            last, now = self._last, time.monotonic()
            if last is not reported and now - last.moment >= self._silence_seconds:
                reported = last
                self._write(self._report(last, now))
            due = (now if last is reported else last.moment) + self._silence_seconds

    def _report(self, last: _Beat, now: float) -> str:
        """The header and the stack of every thread but the watchdog's, the main thread's last."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        main = threading.main_thread().ident
        frames = sorted(sys._current_frames().items(), key=lambda entry: entry[0] == main)
        stacks = [
            f"thread {names.get(thread, thread)}:\n{''.join(traceback.format_stack(frame))}"
            for thread, frame in frames
            if thread != threading.get_ident()
        ]
        return (
            f"watchdog: rank {self._rank} (host {socket.gethostname()}, process {os.getpid()}) has shown no sign of "
            f"life for {now - last.moment:.0f} s, at {last.doing}. Its stacks follow. The run goes on: a slow disk or "
            "a long save looks like this, too. If it hangs, look for the rank that is not waiting in a collective.\n"
            f"{''.join(stacks)}"
        )

    def _write(self, report: str) -> None:
        if self._file is not None:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(report)
            except OSError as error:  # perhaps the very disk that everybody waits for
                report += f"watchdog: {self._file} could not be written ({error})\n"
        stream = sys.__stderr__  # sys.stderr may be silenced around a library's call
        if stream is not None:
            stream.write(report)
            stream.flush()
