"""Evidence holds what was printed, the command, the commit and the exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.record_evidence import main
from orthros_train.errors import InputError


def test_a_failing_command_is_recorded_as_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = "import sys; print('measured 3'); print('warned', file=sys.stderr); sys.exit(3)"
    assert main(["speed", "--folder", str(tmp_path), "--", sys.executable, "-c", script]) == 3
    text = (tmp_path / "speed.txt").read_text(encoding="utf-8")
    head, body = text.split("\n\n", 1)
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert "measured 3" in fields["command"]
    assert fields["exit code"] == "3"
    assert set(fields) == {"command", "commit", "started", "seconds", "exit code", "machine", "versions"}
    assert sorted(body.splitlines()) == ["measured 3", "warned"]
    assert "measured 3" in capsys.readouterr().out


def test_a_missing_command_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot run no-such-command"):
        main(["speed", "--folder", str(tmp_path), "--", "no-such-command"])
