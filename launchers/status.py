"""Show how a run is: its jobs in the queue, step, speed, time left, last checkpoint, restarts.

Reads the run's folder and asks squeue; SLURM's accounting is not needed. Without SLURM, the folder alone is shown.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.table import Table

from launchers import slurm_client
from launchers.run_records import (
    Attempt,
    Job,
    last_metrics,
    newest_checkpoint,
    read_attempts,
    read_jobs,
    read_status,
)
from orthros_train.command_line import CommandParser, run_command
from orthros_train.config import load_config
from orthros_train.errors import InputError

EXAMPLES = """\
  python launchers/status.py outputs/orthros_1.3b
  python launchers/status.py outputs/*                     # one line a run, what is no run is named
  python launchers/status.py outputs/orthros_1.3b --json"""
SPEED_STEPS = 20  # the speed shown is the median of the last so many
SILENT_FACTOR, SILENT_SECONDS = 20, 120  # no step for longer than this many steps' time is worth a word


@dataclass(frozen=True)
class RunState:
    """What is known of a run."""

    run: str
    state: str  # in words
    step: int
    steps: int
    tokens_per_second: float | None
    seconds_left: float | None
    checkpoint: int
    starts: int
    last_outcome: str | None
    jobs: dict[str, str]  # "17 train" -> its state and why it waits


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("runs", metavar="DIR", nargs="+", help="output_dir of a run, or of an array of seeds")
    parser.add_argument("--json", action="store_true", help="print one JSON object a run")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the runs; 0 if there is one, else 2. What cannot be shown is named. Raises InputError on bad options."""
    options = build_parser().parse_args(arguments)
    states: list[RunState] = []
    problems: list[InputError] = []
    for folder in map(Path, options.runs):
        try:
            for run in find_runs(folder):
                try:
                    states.append(run_state(run))
                except InputError as error:
                    problems.append(error)
        except InputError as error:
            problems.append(error)
    if options.json:
        for state in states:
            print(json.dumps(asdict(state)))
    elif states:
        show(states)
    for problem in problems:
        print(f"error: {' '.join(str(problem).split())}", file=sys.stderr)
    return 0 if states else 2


def find_runs(folder: Path) -> list[Path]:
    """The folder itself, or the runs of an array below it.

    Raises:
        InputError: there is no trace of a run.
    """
    below = sorted(path for path in folder.glob("seed_*") if path.is_dir())
    if below and not (folder / "config.yaml").exists():
        return below
    if not (folder / "config.yaml").exists() and not read_jobs(folder):
        raise InputError(f"{folder} holds neither a run nor submitted jobs; give a run's output_dir")
    return [folder]


def run_state(run: Path) -> RunState:
    """Look at a run. Raises InputError where its files are damaged."""
    config = load_config(run / "config.yaml") if (run / "config.yaml").exists() else None
    steps = 0 if config is None else config.train.steps
    records = last_metrics(run, SPEED_STEPS)
    step = records[-1]["step"] if records else 0
    seconds = statistics.median(record["step_seconds"] for record in records) if records else None
    attempts = read_attempts(run)
    jobs = queue_states([*read_jobs(run), *(read_jobs(run.parent) if run.name.startswith("seed_") else [])], attempts)
    status = read_status(run)
    speeds = [record["tokens_per_second"] for record in records]
    state = "not started" if status is None else status.state
    if status is not None and status.reason:
        state += f" ({status.reason})"
    if state == "running":
        state += _doubt(run, seconds, attempts, jobs)
    return RunState(
        run=str(run),
        state=state,
        step=step,
        steps=steps,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        seconds_left=None if seconds is None or state == "done" else (steps - step) * seconds,
        checkpoint=newest_checkpoint(run),
        starts=max(len(attempts), 0 if status is None else status.attempt),
        last_outcome=(attempts[-1].outcome or f"since {attempts[-1].started}, no end recorded") if attempts else None,
        jobs=jobs,
    )


def queue_states(jobs: Sequence[Job], attempts: Sequence[Attempt]) -> dict[str, str]:
    """The state of each job that SLURM still knows, and why it waits."""
    kinds = {attempt.job_id: "train" for attempt in attempts if attempt.job_id is not None}
    kinds |= {job.job_id: job.kind for job in jobs}
    if not kinds or shutil.which("scontrol") is None:
        return {}
    try:
        states = slurm_client.job_states(sorted(kinds))
    except InputError as error:
        return {"queue": f"unknown: {error}"}
    shown = {}
    for job_id, state in states.items():
        reason = slurm_client.waiting_reason(job_id) if state == "PENDING" else None
        shown[f"{job_id} {kinds[job_id]}"] = f"{state} ({reason})" if reason else state
    return shown


def _doubt(run: Path, step_seconds: float | None, attempts: Sequence[Attempt], jobs: dict[str, str]) -> str:
    """What makes "running" doubtful, in words; status.json stays so when a node is lost."""
    ours = str(attempts[-1].job_id) if attempts else None
    known = next((state for name, state in jobs.items() if name.split()[0] == ours), None)
    if known is not None and not known.startswith(("RUNNING", "COMPLETING")):
        return f", says status.json, but its job is {known}"
    newest = max(file.stat().st_mtime for file in (run / "metrics.jsonl", run / "status.json") if file.exists())
    silent = time.time() - newest
    if silent > max(SILENT_SECONDS, SILENT_FACTOR * (step_seconds or 0)):
        return f", but no step for {timedelta(seconds=round(silent))}"
    return ""


def show(states: Sequence[RunState]) -> None:
    """Print a table, and what needs more room below it."""
    table = Table(box=None, pad_edge=False)
    for heading in ("run", "state", "step", "tokens/s", "left", "checkpoint", "starts", "jobs"):
        table.add_column(heading, overflow="fold")
    for state in states:
        left = None if state.seconds_left is None else timedelta(seconds=round(state.seconds_left))
        table.add_row(
            state.run,
            state.state,
            f"{state.step}/{state.steps}" if state.steps else "-",
            "-" if state.tokens_per_second is None else f"{state.tokens_per_second:,.0f}",
            "-" if left is None else str(left),
            str(state.checkpoint or "-"),
            str(state.starts),
            "; ".join(f"{name} {queued}" for name, queued in state.jobs.items()) or "-",
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    for state in states:
        if state.last_outcome:
            console.print(f"{state.run}: last start: {state.last_outcome}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
