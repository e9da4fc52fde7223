"""Run the repository's own commands as steps of a demo."""

from __future__ import annotations

import subprocess
import sys

from evaluation.demo.steps import StepError


def run_tool(script: str, *arguments: str, show: bool = True) -> str:
    """Run a command of tools/; its standard output, which is also shown unless `show` is false.

    Raises:
        StepError: it failed; what it printed says why.
    """
    command = [sys.executable, script, *arguments]
    outcome = subprocess.run(command, stdout=None if show else subprocess.PIPE, text=True, check=False)
    if outcome.returncode:
        raise StepError(f"{script} ended with exit code {outcome.returncode}; the lines above say why")
    return outcome.stdout or ""
