"""What every command of the project does alike: one-line errors, examples in --help, exit codes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from orthros_train.errors import InputError


class CommandParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line and whose help ends in examples."""

    def __init__(self, description: str, examples: str, prog: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise InputError instead of printing the usage."""
        raise InputError(f"{message} (see --help)")


def positive_int(text: str) -> int:
    """An argparse type: an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit with its code (None means 0), or with 2 and one line if it raises InputError."""
    try:
        code = main()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    sys.exit(code or 0)
