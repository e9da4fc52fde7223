"""Prepare WikiText for python -m evaluation.reproduce_wikitext: three text files and a manifest with their SHA-256.

The data set is taken at one pinned revision from the hub, or from parquet files that were placed by hand; those cannot
be verified, and the manifest and every report of them say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from evaluation.wikitext_data import BY_HAND, FROM_HUB, REPOSITORY, REVISION, hub_lines, local_lines, prepare
from orthros_train.command_line import CommandParser, run_command

EXAMPLES = """\
  python tools/prepare_wikitext.py --output data/wikitext
  python tools/prepare_wikitext.py --output data/wikitext --from-dir wikitext-parquet"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(f"{__doc__}\n{REPOSITORY} at {REVISION}.", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument(
        "--from-dir", type=Path, metavar="DIR", help="take the repository's parquet files from here, not from the hub"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    if options.from_dir is not None:
        folder = prepare(options.output, local_lines(options.from_dir), BY_HAND)
        print(f"{folder}: WikiText's files, {BY_HAND}, with manifest.json")
    else:
        folder = prepare(options.output, hub_lines, FROM_HUB)
        print(f"{folder}: WikiText at revision {REVISION}, with manifest.json")
    return 0


if __name__ == "__main__":
    run_command(main)
