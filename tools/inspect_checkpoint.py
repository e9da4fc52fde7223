"""Show what a training checkpoint is and check that it is whole.

Prints its step, layout, data position and files, and compares every file with the size and SHA-256 of the manifest.
Exits with 1 if it is damaged.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orthros_train.command_line import CommandParser, run_command

EXAMPLES = """\
  python tools/inspect_checkpoint.py outputs/run
  python tools/inspect_checkpoint.py outputs/run/checkpoints/step_00000020 --no-verify"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "checkpoint", metavar="DIR", help="a step_* folder, or a run's folder: then its newest checkpoint is taken"
    )
    parser.add_argument("--no-verify", action="store_true", help="do not read the files to compare their hashes")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Inspect one checkpoint; 0 if it is whole, 1 if not. Raises InputError if there is none."""
    options = build_parser().parse_args(arguments)
    from orthros_train.training.inspection import inspect_checkpoint  # noqa: PLC0415  not needed for --help

    report, whole = inspect_checkpoint(options.checkpoint, verify=not options.no_verify)
    print(report)
    return 0 if whole else 1


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
