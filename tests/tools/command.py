"""Runs a tool of tools/ as a user would, in a process of its own or in this one."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _hear_interrupts() -> None:
    """As in a foreground job: one started in the background ignores SIGINT, and hands that on to its children."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def start(tool: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """A process that runs tools/TOOL.py from the repository root."""
    return subprocess.Popen(
        [sys.executable, f"tools/{tool}.py", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as under a shell
        preexec_fn=_hear_interrupts,  # noqa: PLW1509  this process forks no threads of its own
    )


def run(tool: str, *arguments: str | Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a process of its own."""
    process = start(tool, *arguments)
    stdout, stderr = process.communicate(timeout=120)
    return process.returncode, stdout, stderr


def run_here(
    tool: str, *arguments: str | Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    """The same in this process, without the seconds that imports take."""
    monkeypatch.setattr(sys, "argv", [f"tools/{tool}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
    captured = capsys.readouterr()
    assert isinstance(end.value.code, int)
    return end.value.code, captured.out, captured.err
