"""Run a launcher and end as the training ended: for torchrun, mpirun and deepspeed outside SLURM's batch jobs.

These launchers turn exit codes into their own and kill their ranks on a signal before a checkpoint is saved. Here
SIGINT (Ctrl-C), SIGTERM and SIGUSR1 become the file `stop_requested` in the run's folder; a second Ctrl-C kills. The
exit code is the training's: 0 done, 1 failed, 2 bad input, 75 stopped with a checkpoint saved.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launchers.attempt import refuse_second_launch
from launchers.run_records import read_status
from orthros_train.command_line import CommandParser, run_command
from orthros_train.config import load_config
from orthros_train.errors import InputError

EXAMPLES = """\
  python launchers/supervise.py configs/demo.yaml train.steps=100 -- torchrun --standalone --nproc-per-node 2

The rank's program and the run's arguments are added to the launcher's command. launchers/torchrun.sh, mpirun.sh and
deepspeed.sh call this."""
STOP_FILE = "stop_requested"
FAILED = 1
REPEAT_SECONDS = 2.0  # a file from before the ranks started does not count, so it is made again and again


def build_parser() -> CommandParser:
    """The command line, up to `--`."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--program", default="-m orthros_train", help="what a rank runs (default: -m orthros_train)")
    parser.add_argument("--follower", action="store_true", help="another machine records the run and its end")
    parser.add_argument("config", metavar="CONFIG.yaml")
    parser.add_argument("overrides", metavar="key=value", nargs="*")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run the command behind `--`; the exit code. Raises InputError."""
    if {"-h", "--help"} & set(arguments[:1]):
        build_parser().parse_args(["--help"])
    if "--" not in arguments:
        raise InputError("no launcher: write -- and its command behind the run's arguments (see --help)")
    split = list(arguments).index("--")
    options = build_parser().parse_intermixed_args(list(arguments[:split]))
    run = Path(load_config(options.config, options.overrides).output_dir)
    if not options.follower:
        refuse_second_launch(run)
    before = read_status(run)
    command = [*arguments[split + 1 :], *shlex.split(options.program), options.config, *options.overrides]
    code = _run(command, run)
    if options.follower:
        return code
    status = read_status(run)
    if status is None or (before is not None and status.attempt == before.attempt):
        return code or FAILED  # it did not start: bad input, or the launcher itself failed
    return FAILED if status.exit_code is None else status.exit_code


def _run(command: Sequence[str], run: Path) -> int:
    """Run `command` in a process group of its own, so that a Ctrl-C reaches only us; its exit code."""
    requests: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        process = subprocess.Popen(command, start_new_session=True)
    except OSError as error:
        raise InputError(f"{command[0]} cannot be started: {error.strerror}") from error
    said = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(REPEAT_SECONDS)
            if requests.count(signal.SIGINT) > 1:
                os.killpg(process.pid, signal.SIGKILL)
                continue
            if requests and run.is_dir():
                (run / STOP_FILE).touch()
            if requests and not said:
                said = True
                print(f"{signal.Signals(requests[0]).name}: asking the ranks to stop", file=sys.stderr, flush=True)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if requests:
            (run / STOP_FILE).unlink(missing_ok=True)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
