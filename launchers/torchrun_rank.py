"""One rank under torchrun: `python -m orthros_train`, but a stop with a checkpoint saved (75) ends with 0.

torchrun takes every other code for a crash, kills the other ranks and prints a traceback. Launch scripts read what
really happened from status.json (launchers/attempt.py).
"""

from __future__ import annotations

from orthros_train.__main__ import run
from orthros_train.command_line import run_command

STOPPED = 75


def main() -> int:
    """Run this rank."""
    code = run()
    return 0 if code == STOPPED else code


if __name__ == "__main__":
    run_command(main)
