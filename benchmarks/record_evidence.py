"""Run a command and keep what it printed as evidence, with the command, the commit and the machine."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from evaluation.files import write_output
from evaluation.machine import describe_machine
from orthros_train.command_line import CommandParser, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python benchmarks/record_evidence.py tests -- python -m pytest -m evidence -v"""


def record(command: Sequence[str], output: Path) -> int:
    """Run `command`, showing what it prints; write that with its circumstances to `output`; return its exit code."""
    machine = describe_machine()
    started = datetime.now(UTC).isoformat(timespec="seconds")
    start = time.perf_counter()
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise InputError(f"cannot run {command[0]}: {error.strerror or error}") from error
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(line)
        sys.stdout.flush()
        lines.append(line)
    code = process.wait()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    head = {
        "command": shlex.join(command),
        "commit": machine["commit"] or "unknown",
        "started": started,
        "seconds": f"{time.perf_counter() - start:.0f}",
        "exit code": str(code),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']:.0f} GiB",
        "versions": versions,
    }
    text = "".join(f"{name}: {value}\n" for name, value in head.items()) + "\n" + "".join(lines)
    text = text.replace(str(Path.cwd()), ".")  # where the repository lies is nobody's business
    write_output(output, text)
    return code


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("name", help="of the evidence: FOLDER/NAME.txt is written")
    parser.add_argument("--folder", type=Path, default=Path("docs/evidence"), help="default: docs/evidence")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code of what it ran."""
    options = build_parser().parse_args(arguments)
    return record(options.command, options.folder / f"{options.name}.txt")


if __name__ == "__main__":
    run_command(main)
