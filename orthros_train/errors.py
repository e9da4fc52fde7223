"""How a command ends on bad input: one clear line on stderr and exit code 2, never a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class InputError(Exception):
    """The user's input is wrong; the message says what, where, and the remedy in one line."""


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its code (None means 0), or with 2 and one line if it raises InputError."""
    try:
        code = main()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)
