"""A rank that falls silent says where it stands, once a silence, on every rank."""

from __future__ import annotations

import io
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orthros_train.training.watchdog import Watchdog
from tests.distributed import run_distributed


def wait_for_text(read: Callable[[], str], text: str, times: int = 1) -> str:
    """What `read` gives once it holds the text so many times; fails after five seconds."""
    deadline = time.monotonic() + 5
    while read().count(text) < times:
        assert time.monotonic() < deadline, read()
        time.sleep(0.01)
    return read()


@pytest.fixture
def stderr(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The process's real stderr."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "__stderr__", stream)
    return stream


def test_the_report(tmp_path: Path, stderr: io.StringIO) -> None:
    file = tmp_path / "stacks" / "rank_3.txt"
    with Watchdog(0.2, 3, file) as watchdog:
        watchdog.beat("validation after step 12")
        report = wait_for_text(stderr.getvalue, "watchdog:")
        assert file.read_text() == report
    header = report.splitlines()[0]
    assert re.match(
        rf"watchdog: rank 3 \(host {socket.gethostname()}, process \d+\) has shown no sign of life for \d+ s, "
        r"at validation after step 12\. ",
        header,
    )
    assert "The run goes on" in header
    assert report.count("\nthread ") >= 1
    assert "thread watchdog" not in report
    assert report.index("thread MainThread:") > max(m.start() for m in re.finditer(r"\nthread ", report)) - 1
    assert "wait_for_text(stderr.getvalue" in report


def test_once_a_silence(stderr: io.StringIO) -> None:
    with Watchdog(0.2, 0) as watchdog:
        for step in (1, 2):
            watchdog.beat(f"step {step}")
            wait_for_text(stderr.getvalue, f"at step {step}.")
            time.sleep(0.5)
    assert stderr.getvalue().count("watchdog:") == 2


def test_signs_of_life_keep_it_silent(stderr: io.StringIO) -> None:
    with Watchdog(1.0, 0) as watchdog:
        for _ in range(30):
            watchdog.beat("step 1")
            time.sleep(0.05)
    assert stderr.getvalue() == ""


def test_it_ends_with_its_block(stderr: io.StringIO) -> None:
    with Watchdog(0.05, 0):
        assert "watchdog" in [thread.name for thread in threading.enumerate()]
    assert "watchdog" not in [thread.name for thread in threading.enumerate()]
    seen = stderr.getvalue()
    time.sleep(0.2)
    assert stderr.getvalue() == seen


def test_a_file_that_cannot_be_written_does_not_hide_the_report(tmp_path: Path, stderr: io.StringIO) -> None:
    (tmp_path / "stacks").touch()
    with Watchdog(0.05, 0, tmp_path / "stacks" / "rank_0.txt"):
        report = wait_for_text(stderr.getvalue, "could not be written")
    assert "thread MainThread:" in report


def hang(folder: Path) -> None:
    """Rank 1 sleeps; rank 0 waits for it in a collective."""
    file = folder / f"rank_{dist.get_rank()}.txt"
    with Watchdog(0.3, dist.get_rank(), file) as watchdog:
        watchdog.beat("step 4")
        if dist.get_rank() == 1:
            oversleep(folder)
        dist.all_reduce(torch.zeros(1))


def oversleep(folder: Path) -> None:
    for rank in range(2):
        wait_for_text(lambda: "".join(file.read_text() for file in folder.glob(f"rank_{rank}.txt")), "MainThread")  # noqa: B023


def test_every_rank_reports_where_it_hangs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_distributed(hang, 2, tmp_path)
    errors = capfd.readouterr().err
    for rank, place in ((0, "dist.all_reduce(torch.zeros(1))"), (1, "oversleep(folder)")):
        report = (tmp_path / f"rank_{rank}.txt").read_text()
        assert report.startswith(f"watchdog: rank {rank} ")
        assert "at step 4." in report
        assert place in report
        assert report in errors  # in one piece
