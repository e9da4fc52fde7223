"""Before and after each start of a training: refuse what cannot work, and decide how the job goes on.

Launch scripts call this, people need not. `begin` checks the environment and records the start in the run's folder.
`end` reads how the training ended from status.json, since torchrun turns every exit code into 1, and says by its own:

  0   train.steps are done
  75  to be started again: stopped with a checkpoint saved, or failed after it had saved a new one
  2   bad input
  1   anything else: the line that is printed says what

`not-requeued` records that SLURM did not take the job back after a 75.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from launchers.run_records import (
    Attempt,
    Status,
    add_attempt,
    end_attempt,
    newest_checkpoint,
    now,
    own_attempt,
    read_attempts,
    read_status,
)
from launchers.sbatch_script import LOG_FOLDER
from launchers.slurm_client import ENDED, job_states
from launchers.torchrun_rank import CODES_VARIABLE, read_codes
from orthros_train.command_line import CommandParser, count, positive_int, run_command
from orthros_train.config import gradient_accumulation_steps, load_config
from orthros_train.errors import InputError
from orthros_train.launch_environment import environment_number
from orthros_train.launch_protocol import BAD_INPUT, DONE, FAILED, LAUNCHER, STOP_FILE, STOPPED, is_launchers

EXAMPLES = """\
  python launchers/attempt.py begin --ranks-per-node 8 configs/orthros_1.3b.yaml
  python launchers/attempt.py end --restart-limit 20 --signalled configs/orthros_1.3b.yaml"""
AGAIN = STOPPED
OWN_STOPS = ("the wall-clock limit", "SIGTERM")  # how a reason in status.json begins where no person wanted the end
AGAIN_WORDS = "goes back into the queue"
FRUITLESS_STARTS = 3  # so many in a row without a new checkpoint are enough
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("moment", choices=("begin", "end", "not-requeued"))
    parser.add_argument("--ranks-per-node", type=positive_int, default=1, metavar="N", help="that are to be started")
    parser.add_argument("--restart-limit", type=count, default=0, metavar="N", help="restarts that a job may have")
    parser.add_argument("--preflight-failed", action="store_true", help="the training was not started for that reason")
    parser.add_argument("--signalled", action="store_true", help="the launcher asked the training to stop")
    parser.add_argument("--terminated", action="store_true", help="somebody else ends the job: do not start it again")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of them. Raises InputError."""
    options = build_parser().parse_intermixed_args(arguments)
    return {"begin": begin, "end": end, "not-requeued": not_requeued}[options.moment](options)


def begin(options: argparse.Namespace) -> int:
    """Check the environment against the config and record the start; FAILED if it must not be.

    Raises:
        InputError: the environment contradicts the config, or another job trains in the folder.
    """
    config = load_config(options.config, options.overrides)
    run = Path(config.output_dir)
    check_environment(options.ranks_per_node)
    nodes = environment_number("SLURM_NNODES", 1)
    gradient_accumulation_steps(config, nodes * options.ranks_per_node)
    refuse_second_launch(run)
    status = read_status(run)
    attempt = Attempt(
        job_id=environment_number("SLURM_JOB_ID", 0) or None,
        restart=environment_number("SLURM_RESTART_COUNT", 0),
        nodes=os.environ.get("SLURM_JOB_NODELIST", socket.gethostname()),
        started=now(),
        attempt_before=0 if status is None else status.attempt,
        checkpoint_before=newest_checkpoint(run),
    )
    if refusal := why_not(run, attempt, options.restart_limit):
        refused = replace(attempt, ended=now(), outcome=refusal)
        say_and_record(run, refusal, lambda: add_attempt(run, refused))
        return FAILED
    try:
        add_attempt(run, attempt)
    except OSError as error:
        raise InputError(
            f"{run / LOG_FOLDER} cannot be written ({error.strerror}): make room there, or choose another output_dir"
        ) from error
    where = f"from step {attempt.checkpoint_before}" if attempt.checkpoint_before else "from the start"
    say(f"{now()} {attempt.nodes}: {nodes} x {options.ranks_per_node} ranks, restart {attempt.restart}, {where}")
    return 0


def why_not(run: Path, attempt: Attempt, restart_limit: int) -> str | None:
    """Why this start ends the job instead, in words: a person's stop file, which is used up by that, or the limit."""
    file = run / STOP_FILE
    remove_launchers_file(file)
    if file.exists():  # made while the job waited, or shortly before the end of the last start
        file.unlink(missing_ok=True)
        return f"stopped by the file {STOP_FILE} before the training had started; submit it anew to go on"
    if attempt.restart > restart_limit:  # SLURM restarts jobs on its own after a lost node or preemption
        return f"not started: this is restart {attempt.restart}, the limit is {restart_limit}; submit it anew to go on"
    return None


def remove_launchers_file(file: Path) -> None:
    """Remove the stop file where a launcher wrote it, for a start that is over."""
    if is_launchers(file):
        file.unlink(missing_ok=True)


def check_environment(ranks_per_node: int) -> None:
    """Raise InputError where the environment contradicts one torchrun a node with so many ranks."""
    inherited = [name for name in RANK_VARIABLES if name in os.environ]
    if inherited:
        raise InputError(
            f"{', '.join(inherited)} of the environment belong to ranks, but this starts launchers: submit from a "
            "shell that no launcher started, or unset them"
        )
    tasks, nodes = environment_number("SLURM_NTASKS", 1), environment_number("SLURM_NNODES", 1)
    if tasks != nodes:
        raise InputError(
            f"the job has {tasks} tasks on {nodes} nodes, but one torchrun a node starts the ranks: "
            "set #SBATCH --ntasks-per-node=1"
        )
    gpus = environment_number("SLURM_GPUS_ON_NODE", 0)
    if gpus and ranks_per_node > gpus:
        raise InputError(
            f"{ranks_per_node} ranks a node but SLURM gave this job {gpus} GPUs a node: start at most one rank a GPU"
        )


def refuse_second_launch(run: Path) -> None:
    """Raise InputError if another job that is still alive trains in `run`.

    Where SLURM cannot be asked (inside a container, or its controller is down), the training's own lock decides.
    """
    ours = environment_number("SLURM_JOB_ID", 0)
    others = sorted(
        {
            attempt.job_id
            for attempt in read_attempts(run)
            if attempt.job_id is not None and attempt.ended is None and attempt.job_id != ours
        }
    )
    if not others:
        return
    try:
        states = job_states(others)
    except InputError as error:
        say(f"whether job {', '.join(map(str, others))} still trains in {run} is not known: {error}")
        return
    for job_id, state in states.items():
        if state not in ENDED:
            raise InputError(
                f"job {job_id} ({state}) trains in {run}: wait for it, end it with `scancel {job_id}`, or choose "
                "another output_dir"
            )


def end(options: argparse.Namespace) -> int:
    """Say how the attempt ended, record it, and return what the launcher shall do."""
    config = load_config(options.config, options.overrides)
    run = Path(config.output_dir)
    attempts = own_attempts(run)
    remove_launchers_file(run / STOP_FILE)
    checkpoint = newest_checkpoint(run)
    code, outcome = decide(
        read_status(run),
        attempts[-1],
        checkpoint=checkpoint,
        restarts_left=options.restart_limit - attempts[-1].restart,
        fruitless=fruitless_starts(attempts, checkpoint),
        refused=BAD_INPUT in take_codes(),
        preflight_failed=options.preflight_failed,
        signalled=options.signalled,
        terminated=options.terminated,
    )
    say_and_record(run, outcome, lambda: end_attempt(run, outcome))
    return code


def take_codes() -> set[int]:
    """The exit codes that the ranks of this start have noted, which are used up by that."""
    if CODES_VARIABLE not in os.environ:
        return set()
    file = Path(os.environ[CODES_VARIABLE])
    codes = read_codes(file)
    file.unlink(missing_ok=True)
    return codes


def not_requeued(options: argparse.Namespace) -> int:
    """Record that the job could not be put back into the queue; FAILED."""
    run = Path(load_config(options.config, options.overrides).output_dir)
    ended = own_attempts(run)[-1].outcome or ""
    outcome = f"{ended.split(AGAIN_WORDS)[0]}SLURM did not take the job back into the queue; submit it anew to go on"
    say_and_record(run, outcome, lambda: end_attempt(run, outcome))
    return FAILED


def say_and_record(run: Path, outcome: str, record: Callable[[], None]) -> None:
    """Print an outcome, and then record it if the disk allows: what the job does next does not depend on it."""
    say(f"{now()} {outcome}")
    try:
        record()
    except OSError as error:
        say(f"warning: not recorded in {run / LOG_FOLDER}: {error.strerror}", sys.stderr)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once; where even the log's disk is full, go on without."""
    stream = stream or sys.stdout
    try:
        print(line, file=stream, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # for the flush at exit, which would fail again


def own_attempts(run: Path) -> list[Attempt]:
    """The starts of this job (outside SLURM, all), at least one. Raises InputError."""
    attempts = read_attempts(run)
    newest = own_attempt(run, attempts)
    return [attempt for attempt in attempts if attempt.job_id == newest.job_id]


def fruitless_starts(attempts: Sequence[Attempt], checkpoint: int) -> int:
    """How many starts, the newest ones in a row, have seen no checkpoint newer than before them."""
    return len(list(itertools.takewhile(lambda one: checkpoint <= one.checkpoint_before, reversed(attempts))))


def decide(
    status: Status | None,
    attempt: Attempt,
    *,
    checkpoint: int,
    restarts_left: int,
    fruitless: int,
    refused: bool,
    preflight_failed: bool,
    signalled: bool,
    terminated: bool,
) -> tuple[int, str]:
    """The exit code and the outcome in words of an attempt that is over.

    Args:
        status: status.json now.
        attempt: as `begin` recorded it.
        checkpoint: step of the newest checkpoint now.
        restarts_left: how often the job may still be started again.
        fruitless: starts in a row without a new checkpoint, this one included; 0 if it saved one.
        refused: a rank ended with bad input.
        preflight_failed: the training was not started, since the nodes are not fit for it.
        signalled: the launcher asked for a stop, before the time limit.
        terminated: SLURM or a person ends the job and decides on its own whether it comes back.
    """
    started = status if status is not None and status.attempt > attempt.attempt_before else None
    if started is not None and started.state == "done":
        return DONE, f"done: {started.step} steps"
    if started is not None and started.exit_code == BAD_INPUT:
        return BAD_INPUT, f"refused: {started.reason}"
    if started is None and refused:
        return BAD_INPUT, "refused before the training had started: see the log above"
    if started is not None and started.state == "stopped":
        story = f"stopped at step {started.step} by {started.reason}"
        wanted = not _a_persons(started.reason or "") and (signalled or (started.reason or "").startswith(OWN_STOPS))
    elif started is not None:
        died = started.reason or "the ranks died without a word: see the log above"
        story = f"failed after step {max(started.step, checkpoint)}: {died}"
        wanted = checkpoint > attempt.checkpoint_before
    elif signalled:
        story, wanted = "asked to stop before the training had started", True
    elif preflight_failed:  # of a later start: what has worked once may work again, on other nodes
        story, wanted = "the preflight failed: see the log above", attempt.restart > 0
    else:
        story, wanted = "the training did not start: see the log above", False
    if terminated:
        return FAILED, f"{story}; the job was ended from outside, SLURM decides whether it comes back"
    preempted = started is not None and (started.reason or "").startswith("SIGTERM")  # raising --time would not help
    refusal = _no_restart(wanted, 0 if preempted else fruitless, restarts_left)
    if refusal is not None:
        return FAILED, f"{story}; not started again{refusal}"
    return AGAIN, f"{story}; {AGAIN_WORDS} ({restarts_left} restarts left)"


def _a_persons(reason: str) -> bool:
    """Whether a person's stop file is the reason, however many signals came after it."""
    return STOP_FILE in reason and f"({LAUNCHER}" not in reason


def _no_restart(wanted: bool, fruitless: int, restarts_left: int) -> str | None:
    """Why there is no further start; empty where nothing is to be said, None if there is one."""
    if not wanted:
        return ""
    if fruitless >= FRUITLESS_STARTS:
        return f": {fruitless} starts in a row without a new checkpoint"
    if restarts_left <= 0:
        return ": the limit of restarts is reached, submit it anew to go on"
    return None


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
