"""What every command of the project does alike: one-line errors, examples in --help, exit codes."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from orthros_train.errors import InputError
from orthros_train.freed_memory import keep_freed_memory


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


def int_between(low: int, high: int) -> Callable[[str], int]:
    """An argparse type: an integer from `low` to `high`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{shortened(text)!r} is not an integer") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}")
        if value > high:
            raise argparse.ArgumentTypeError(f"must be at most {high}")
        return value

    return integer


LARGEST_COUNT = 2**31 - 1  # an int32: what tokenizers, tensors and indices count with
LARGEST_SEED = 2**63 - 1
count = int_between(0, LARGEST_COUNT)
positive_int = int_between(1, LARGEST_COUNT)
seed = int_between(0, LARGEST_SEED)


def unicode_text(text: str) -> str:
    """An argparse type: text that came as valid UTF-8; Python hands other bytes on as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"not UTF-8 text (character {error.start + 1} is a stray byte)") from None
    return text


def shortened(text: str, length: int = 40) -> str:
    """The beginning of a text, for messages."""
    return text if len(text) <= length else f"{text[:length]}…"


def counted(number: int, noun: str) -> str:
    """ "1 file", "1,234 files": a number and a noun whose plural takes an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` and exit: with its code (None means 0), with 2 and one line if it raises InputError, with 130 after
    an interrupt that it did not handle, with 1 if the reader of its output has gone away.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path or a text that the terminal's encoding lacks is no crash
            stream.reconfigure(errors="backslashreplace")
    keep_freed_memory()
    try:
        code = main() or 0
        sys.stdout.flush()
    except InputError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        code = 1
    sys.exit(code)
