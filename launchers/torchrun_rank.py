"""One rank under torchrun: `python -m orthros_train`, but a stop with a checkpoint saved (75) ends with 0.

torchrun takes every other code for a crash, kills the other ranks, prints a traceback and ends with 1. What really
happened is in status.json and, for launchers/attempt.py and launchers/supervise.py, in the file that CODES_VARIABLE
names: status.json does not exist where bad input was found first, and other machines may see it late.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from orthros_train.__main__ import run
from orthros_train.command_line import run_command
from orthros_train.errors import InputError
from orthros_train.launch_environment import environment_number
from orthros_train.launch_protocol import BAD_INPUT, STOPPED

OTHERS_SECONDS = 10.0  # for ranks on other machines to find the same: the end of torchrun on the head ends them all
CODES_VARIABLE = "ORTHROS_RANK_CODES"  # the file to which each rank adds a line, its exit code


def main() -> int:
    """Run this rank."""
    try:
        code = run()
    except InputError:
        _note(BAD_INPUT)
        if environment_number("WORLD_SIZE", 1) > environment_number("LOCAL_WORLD_SIZE", 1):
            time.sleep(OTHERS_SECONDS)
        raise
    _note(code)
    return 0 if code == STOPPED else code


def read_codes(file: Path) -> set[int]:
    """The exit codes of this machine's ranks; of ranks elsewhere, those that reached the file whole."""
    if not file.exists():
        return set()
    return {int(word) for word in file.read_text(encoding="utf-8").split() if word.isdecimal()}


def _note(code: int) -> None:
    if CODES_VARIABLE not in os.environ:
        return
    try:
        with open(os.environ[CODES_VARIABLE], "a", encoding="utf-8") as file:
            file.write(f"{code}\n")
    except OSError as error:
        print(f"warning: exit code {code} is not noted for the launcher: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(main)
