"""Has anything become slower? Two results of the same benchmark, or two folders of them, side by side.

* Ratios are judged first: speed-up over the transformer arm, share of the FLOP limit, time over that of a peer, growth
  with the length, peak memory over the KV cache. Both sides of each were measured in turn in one process, so that they
  hold on a machine that is slower today.
* Where a case has a time over a peer's, speed-up and share are judged only if that became worse, too, beyond its
  spread: they also drop when the transformer arm becomes faster, which is no loss of ours.
* A speed-up of processor time is judged only where there is none of wall time.
* A time is judged where the case has no peer to be set against, and the machine is the same; elsewhere it is shown.
  Peak memory always is. What a peer itself takes is shown.
* A figure is a regression if it is worse by more than --tolerance and beyond its spread: each median lies outside the
  other's middle half (from the first to the third quartile of its single measurements).
* What only OLD has, a case, a figure or a file, is missing, which counts as a regression does.

Exits 1 on either. Results of different benchmarks, settings or machines are refused, unless --force says to compare
them all the same. Versions and commits may differ, and are named; so is a setting that only one of them has, since
results outlive the options of a benchmark.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.benchmarking.result import COLUMNS, print_table, read_results
from evaluation.command_line import non_negative_number
from orthros_train.command_line import CommandParser, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python benchmarks/compare.py old/prefill.json outputs/benchmarks/prefill.json
  python benchmarks/compare.py old outputs/benchmarks --tolerance 0.05"""
TIMES = ("seconds", "processor_seconds")
# The figures that are compared, and whether more is better.
MORE_IS_BETTER = {
    **dict.fromkeys(("speedup", "processor_speedup", "share"), True),
    **dict.fromkeys(("over_peer", "growth", *TIMES, "peak_growth_mib", "peak_over_cache"), False),
}
PEERS = ("llama", "hf")  # arms that are not ours
OWN_OF_A_RUN = ("versions", "commit")  # of the machine's entries


@dataclass(frozen=True)
class Change:
    """A figure of a case, before and after, and whether it is judged."""

    case: str
    figure: str
    old: float
    new: float
    beyond_spread: bool
    judged: bool

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old if self.old else float("inf" if self.new else 1)

    def is_regression(self, tolerance: float) -> bool:
        """Whether it is worse by more than the tolerance and than the spread explains."""
        better, worse = (self.new, self.old) if MORE_IS_BETTER[self.figure] else (self.old, self.new)
        return self.judged and self.beyond_spread and worse > better * (1 + tolerance)


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("old", type=Path, metavar="OLD", help="a result, or a folder of results")
    parser.add_argument(
        "new", type=Path, metavar="NEW", help="of the same kind; in folders files of one name go together"
    )
    parser.add_argument(
        "--tolerance", type=non_negative_number, default=0.1, help="how much worse is no regression; default: 0.1"
    )
    parser.add_argument("--force", action="store_true", help="compare different settings or machines all the same")
    return parser


def pairs(old: Path, new: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """The files to compare, and the names of those that only `old` has.

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
    return [(old / name, new / name) for name in sorted(names[0] & names[1])], sorted(names[0] - names[1])


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """What makes two results incomparable."""
    if old["benchmark"] != new["benchmark"]:
        yield f"benchmark {old['benchmark']!r} and {new['benchmark']!r}"
        return
    compared = {
        "settings": old["settings"].keys() & new["settings"].keys(),
        "machine": (old["machine"].keys() | new["machine"].keys()) - set(OWN_OF_A_RUN),
    }
    for part, names in compared.items():
        for name in sorted(names):
            before, after = old[part].get(name), new[part].get(name)
            if before != after:
                yield f"{part}.{name} {before!r} and {after!r}"


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[Change], list[str]]:
    """Every compared figure of both results, and what is missing from `new`."""
    same_machine = not any(difference.startswith("machine.") for difference in differences(old, new))
    after = {record["case"]: record for record in new["records"]}
    found, missing = [], []
    for before in old["records"]:
        case = before["case"]
        if case not in after:
            missing.append(case)
            continue
        unjudged = _unjudged(before, after[case], same_machine)
        for figure in (figure for figure in MORE_IS_BETTER if before.get(figure) is not None):
            if after[case].get(figure) is None:
                missing.append(f"{case}, {COLUMNS[figure][0]}")
                continue
            beyond = _beyond_spread(figure, before, after[case])
            found.append(Change(case, figure, before[figure], after[case][figure], beyond, figure not in unjudged))
    return found, missing


def _unjudged(before: Mapping[str, Any], after: Mapping[str, Any], same_machine: bool) -> set[str]:
    """The figures of a case that are shown alone."""
    if before.get("arm") in PEERS:
        return set(MORE_IS_BETTER)
    has_peer = before.get("over_peer") is not None
    found = set(TIMES) if has_peer or not same_machine else set()
    if before.get("speedup") is not None:
        found.add("processor_speedup")
    if has_peer and after.get("over_peer") is not None:
        slower = after["over_peer"] > before["over_peer"] and _beyond_spread("over_peer", before, after)
        found |= set() if slower else {"speedup", "share"}
    return found


def _beyond_spread(figure: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether each median lies outside the middle half of the other's single measurements."""
    old, new = (record.get(f"all_{figure}") or [record[figure]] for record in (before, after))
    return _is_outside(statistics.median(new), old) and _is_outside(statistics.median(old), new)


def _is_outside(value: float, values: Sequence[float]) -> bool:
    """Whether it lies outside their first and third quartiles; those of a single measurement are itself."""
    quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values
    return not quartiles[0] <= value <= quartiles[-1]


def notes_of(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs without making the results incomparable: added cases, settings of one of them, versions, commits."""
    cases = [{record["case"] for record in result["records"]} for result in (old, new)]
    notes = [f"only in the new result: {case}" for case in sorted(cases[1] - cases[0])]
    for name in sorted(old["settings"].keys() ^ new["settings"].keys()):
        which, settings = ("old", old["settings"]) if name in old["settings"] else ("new", new["settings"])
        notes.append(f"only in the {which} result: settings.{name} {settings[name]!r}")
    for name in OWN_OF_A_RUN:
        before, after = old["machine"].get(name), new["machine"].get(name)
        if before != after:
            notes.append(f"{name}: {before} and {after}")
    return notes


def compare(old: Path, new: Path, tolerance: float, force: bool) -> int:
    """Print the table of two results; the number of regressions and of what is missing.

    Raises:
        InputError: they are of different things, and `force` is not set; or they have nothing in common.
    """
    before, after = read_results(old), read_results(new)
    different = list(differences(before, after))
    if different and not force:
        raise InputError(f"{old} and {new} differ in {'; '.join(different)}; pass --force to compare them all the same")
    found, missing = changes(before, after)
    if not found:
        raise InputError(f"{old} and {new} have no figure of the same case in common")
    rows = [
        [
            change.case,
            COLUMNS[change.figure][0],
            f"{change.old:.4g}",
            f"{change.new:.4g}",
            f"{change.ratio:.3f}",
            "beyond" if change.beyond_spread else "within",
            "REGRESSION" if change.is_regression(tolerance) else "" if change.judged else "shown",
        ]
        for change in found
    ]
    head = ["", "figure", "old", "new", "new / old", "spread", ""]
    notes = [f"MISSING from {new}: {what}" for what in missing]
    notes += [*(f"differs: {difference}" for difference in different), *notes_of(before, after)]
    print_table(after["benchmark"], head, rows, notes)
    return sum(change.is_regression(tolerance) for change in found) + len(missing)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    files, missing = pairs(options.old, options.new)
    faults = sum(compare(old, new, options.tolerance, options.force) for old, new in files) + len(missing)
    for name in missing:
        print(f"MISSING from {options.new}: {name}")
    if faults:
        print(f"{faults} missing, or worse by more than {options.tolerance:.0%}")
    return 1 if faults else 0


if __name__ == "__main__":
    run_command(main)
