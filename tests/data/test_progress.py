"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from orthros_train.data import progress
from orthros_train.data.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_lines_come_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with Progress("job", 200) as bar:
        bar.update(50, "few tokens")  # too early for a line
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_SECONDS", 0.0)
    with Progress("job", 200) as bar:
        bar.update(50, "few tokens")
        bar.update(200, "all tokens")
    assert capsys.readouterr().err == "job: 25%, few tokens\njob: 100%, all tokens\n"


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with Progress("job", 200) as bar:
        bar.update(50, "few tokens")
    drawn = terminal.getvalue()
    assert "job" in drawn
    assert "25%" in drawn
    assert "few tokens" in drawn


def test_nothing_to_do_is_no_division_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL_SECONDS", 0.0)
    with Progress("job", 0) as bar:
        bar.update(0, "")
