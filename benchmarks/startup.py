"""How long does it take to start: to import the model, and to answer --help?

Each in a process of its own, in turn, after one that warms the file cache. The import of orthros_train.model is set
beside that of transformers' base classes, which it needs. The commands are every script and module of the repository
that ends in `run_command`, and the launchers' shell scripts.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from evaluation.benchmarking.result import Record, Result, counted_calls, quotients, timed
from evaluation.command_line import non_negative_number
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python benchmarks/startup.py --output outputs/benchmarks/startup.json
  python benchmarks/startup.py --output imports.json --only import --repeats 20"""
ROOT = Path(__file__).parents[1]
MODULES, SCRIPTS = ("orthros_train", "evaluation"), ("launchers", "tools", "benchmarks")
PEER = "import: transformers' base classes"
IMPORTS = {
    PEER: "from transformers import PreTrainedModel, GenerationMixin",
    "import: orthros_train.model": "import orthros_train.model",
}


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", metavar="TEXT", help="cases whose name holds this; default: all")
    parser.add_argument(
        "--limit", type=non_negative_number, default=2.0, help="seconds that --help may take; default: 2"
    )
    parser.add_argument("--repeats", type=positive_int, default=5, help="timed starts; default: 5")
    return parser


def commands() -> dict[str, list[str]]:
    """The commands of the repository, by how they are called from its root."""
    found = {}
    for folder in (*MODULES, *SCRIPTS):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = path.read_text(encoding="utf-8").splitlines()
            if 'if __name__ == "__main__":' in lines and any("run_command(" in line for line in lines[-2:]):
                parts = path.relative_to(ROOT).with_suffix("").parts
                module = ".".join(parts[:-1] if parts[-1] == "__main__" else parts)
                call = ["-m", module] if folder in MODULES else [path.relative_to(ROOT).as_posix()]
                found[" ".join(call)] = [sys.executable, *call]
    for path in sorted((ROOT / "launchers").glob("*.sh")):
        name = path.relative_to(ROOT).as_posix()
        found[name] = ["bash", name]
    return found


def measure(options: argparse.Namespace) -> list[Record]:
    """One record an import and a command."""
    from evaluation.arm_times import interleaved  # noqa: PLC0415

    starts = {name: [sys.executable, "-c", code] for name, code in IMPORTS.items()}
    starts |= {f"{name} --help": [*command, "--help"] for name, command in commands().items()}
    starts = {name: command for name, command in starts.items() if options.only is None or options.only in name}
    if not starts:
        raise InputError(f"--only {options.only!r} is part of no case")
    processor: dict[str, list[float]] = {name: [] for name in starts}

    def call(name: str, command: list[str]) -> Callable[[], None]:
        return lambda: processor[name].append(processor_seconds(command))

    calls = {name: call(name, command) for name, command in starts.items()}
    with counted_calls("startup", len(calls) * (options.repeats + 1)) as on_call:
        found = interleaved(calls, options.repeats, on_call)
    records = {}
    for name, seconds in found.items():
        own = processor[name][1:]  # less the warm-up
        records[name] = timed(name, seconds, processor_seconds=statistics.median(own), all_processor_seconds=own)
        if name in IMPORTS and PEER in records:
            records[name]["over_peer"] = records[name]["seconds"] / records[PEER]["seconds"]
            records[name]["all_over_peer"] = quotients(seconds, found[PEER])
    return list(records.values())


def processor_seconds(command: Sequence[str]) -> float:
    """Run a command and return the processor time that it took.

    Raises:
        InputError: it failed.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it printed nothing")
        raise InputError(f"{' '.join(command[1:])} ended with exit code {done.returncode}: {last}")
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    result = Result("startup", options, apart=["limit"])
    records = measure(options)
    slow = [
        f"over {options.limit:g} s: {record['case']}"
        for record in records
        if record["case"].endswith("--help") and record["seconds"] > options.limit
    ]
    result.write(records, slow)
    return 0


if __name__ == "__main__":
    run_command(main)
