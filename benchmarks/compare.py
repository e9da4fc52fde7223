"""Has anything become slower? Two results of the same benchmark, or two folders of them, side by side.

A figure is outside the spread if the ranges of its single measurements do not overlap; one measured once has no range.
It is a regression if it is outside the spread and worse by more than --tolerance: longer, or larger. Exits 1 if there
is one. Results of different benchmarks, settings or machines are refused, unless --force says to compare them all the
same; versions and commits may differ, and are named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.benchmarking.result import COLUMNS, print_table, read_results
from orthros_train.command_line import CommandParser, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python benchmarks/compare.py old/prefill.json outputs/benchmarks/prefill.json
  python benchmarks/compare.py old outputs/benchmarks --tolerance 0.05"""
COMPARED = ("seconds", "processor_seconds", "peak_growth_mib")  # the less the better
OWN_OF_A_RUN = ("versions", "commit")  # of the machine's entries


@dataclass(frozen=True)
class Change:
    """A figure of a case, before and after."""

    case: str
    figure: str
    old: float
    new: float
    outside_spread: bool

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf" if self.new else 1)

    def is_regression(self, tolerance: float) -> bool:
        """Whether it is worse by more than the tolerance and than the spread explains."""
        return self.outside_spread and self.ratio > 1 + tolerance


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("old", type=Path, metavar="OLD", help="a result, or a folder of results")
    parser.add_argument(
        "new", type=Path, metavar="NEW", help="of the same kind; in folders files of one name go together"
    )
    parser.add_argument("--tolerance", type=float, default=0.1, help="how much worse is no regression; default: 0.1")
    parser.add_argument("--force", action="store_true", help="compare different settings or machines all the same")
    return parser


def pairs(old: Path, new: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """The files to compare, and a note on each that has no partner.

    Raises:
        InputError: a file beside a folder, or folders without a name in common.
    """
    if old.is_dir() != new.is_dir():
        raise InputError(f"{old} and {new} are a file and a folder; give two of a kind")
    if not old.is_dir():
        return [(old, new)], []
    names = [{path.name for path in folder.glob("*.json")} for folder in (old, new)]
    if not names[0] & names[1]:
        raise InputError(f"{old} and {new} have no result of the same name")
    notes = [f"only in {folder}: {name}" for folder, here in zip((old, new), names, strict=True)
             for name in sorted(here - (names[0] & names[1]))]  # fmt: skip
    return [(old / name, new / name) for name in sorted(names[0] & names[1])], notes


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What makes two results incomparable."""
    if old["benchmark"] != new["benchmark"]:
        yield f"benchmark {old['benchmark']!r} and {new['benchmark']!r}"
        return
    for part in ("settings", "machine"):
        for name in sorted({*old[part], *new[part]} - set(OWN_OF_A_RUN)):
            before, after = old[part].get(name), new[part].get(name)
            if before != after:
                yield f"{part}.{name} {before!r} and {after!r}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Every compared figure of every case that both results have."""
    before = {record["case"]: record for record in old["records"]}
    found = []
    for record in new["records"]:
        earlier = before.get(record["case"], {})
        for figure in COMPARED:
            if record.get(figure) is not None and earlier.get(figure) is not None:
                ranges = [each.get(f"all_{figure}") or [each[figure]] for each in (earlier, record)]
                outside = max(ranges[0]) < min(ranges[1]) or max(ranges[1]) < min(ranges[0])
                found.append(Change(record["case"], figure, earlier[figure], record[figure], outside))
    return found


def notes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs without making the results incomparable: cases, versions, commits."""
    cases = [{record["case"] for record in result["records"]} for result in (old, new)]
    notes = [f"only in the old result: {case}" for case in sorted(cases[0] - cases[1])]
    notes += [f"only in the new result: {case}" for case in sorted(cases[1] - cases[0])]
    for name in OWN_OF_A_RUN:
        before, after = old["machine"].get(name), new["machine"].get(name)
        if before != after:
            notes.append(f"{name}: {before} and {after}")
    return notes


def compare(old: Path, new: Path, tolerance: float, force: bool) -> int:
    """Print the table of two results; the number of regressions.

    Raises:
        InputError: they are of different things, and `force` is not set; or they have nothing in common.
    """
    before, after = read_results(old), read_results(new)
    different = list(differences(before, after))
    if different and not force:
        raise InputError(f"{old} and {new} differ in {'; '.join(different)}; pass --force to compare them all the same")
    found = changes(before, after)
    if not found:
        raise InputError(f"{old} and {new} have no figure of the same case in common")
    rows = [
        [
            change.case,
            COLUMNS[change.figure][0],
            f"{change.old:.4g}",
            f"{change.new:.4g}",
            f"{change.ratio:.3f}",
            "outside" if change.outside_spread else "within",
            "REGRESSION" if change.is_regression(tolerance) else "",
        ]
        for change in found
    ]
    head = ["", "figure", "old", "new", "new / old", "spread", ""]
    notes = [*(f"differs: {difference}" for difference in different), *notes_of(before, after)]
    print_table(after["benchmark"], head, rows, notes)
    return sum(change.is_regression(tolerance) for change in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    if options.tolerance < 0:
        raise InputError(f"--tolerance is {options.tolerance}: it must not be negative")
    files, notes = pairs(options.old, options.new)
    regressions = sum(compare(old, new, options.tolerance, options.force) for old, new in files)
    for note in notes:
        print(note)
    if regressions:
        print(f"{regressions} worse by more than {options.tolerance:.0%}")
    return 1 if regressions else 0


if __name__ == "__main__":
    run_command(main)
