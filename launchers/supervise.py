"""Run a launcher and end as the training ended: for torchrun, mpirun and deepspeed outside SLURM's batch jobs.

These launchers turn exit codes into their own and kill their ranks on a signal before a checkpoint is saved. Here
SIGINT (Ctrl-C), SIGTERM, SIGHUP and SIGUSR1 become the file `stop_requested` in the run's folder; a second Ctrl-C kills
every process that was started. The exit code is the training's: 0 done, 1 failed, 2 bad input, 75 stopped with a
checkpoint saved.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType

import psutil

from launchers.attempt import refuse_second_launch
from launchers.run_records import Status, read_status
from launchers.torchrun_rank import CODES_VARIABLE, read_codes
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.config import load_config
from orthros_train.errors import InputError
from orthros_train.launch_environment import MPI_SIZES, SRUN_SIZE, environment_number
from orthros_train.launch_protocol import BAD_INPUT, FAILED, LAUNCHER, STOP_FILE, is_launchers

EXAMPLES = """\
  python launchers/supervise.py configs/demo.yaml train.steps=100 -- torchrun --standalone --nproc-per-node 2

The rank's program and the run's arguments are added to the launcher's command. launchers/torchrun.sh, mpirun.sh and
deepspeed.sh call this."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
REPEAT_SECONDS = 1.0  # a file from before the ranks started does not count, so it is made again and again
LAST_SECONDS = 5.0  # after a second Ctrl-C
SAVING_SECONDS = 300.0  # for ranks whose launcher has died


def build_parser() -> CommandParser:
    """The command line, up to `--`."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--program", default="-m orthros_train", help="what a rank runs (default: -m orthros_train)")
    parser.add_argument(
        "--launchers", type=positive_int, default=1, metavar="N", help="machines where this is started, once each"
    )
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
    refuse_inside_a_launcher(options.launchers)
    run = Path(load_config(options.config, options.overrides).output_dir)
    refuse_second_launch(run)
    before = read_status(run)
    command = [*arguments[split + 1 :], *shlex.split(options.program), options.config, *options.overrides]
    with tempfile.TemporaryDirectory(prefix="orthros-") as folder:
        codes = Path(folder) / "codes"
        code = _run(command, run, {**os.environ, CODES_VARIABLE: str(codes)})
        ranks = read_codes(codes)
    return final_code(code, ranks, before, read_status(run))


def refuse_inside_a_launcher(launchers: int) -> None:
    """Raise InputError where another launcher would start this once a rank, or more often than wanted."""
    inherited = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    inherited += [name for name in MPI_SIZES if environment_number(name, 1) > launchers]
    if inherited:
        raise InputError(f"{', '.join(inherited)} is set: a launcher has started this already; unset it")
    tasks, nodes = environment_number(SRUN_SIZE, 1), environment_number("SLURM_STEP_NUM_NODES", 1)
    if tasks > launchers or tasks > nodes:
        wanted = "once" if launchers == 1 else "once a node"
        raise InputError(f"srun started {tasks} tasks on {nodes} nodes: start this {wanted}")


def final_code(launcher: int, ranks: Iterable[int], before: Status | None, status: Status | None) -> int:
    """The training's exit code.

    Args:
        launcher: its exit code.
        ranks: those of this machine's ranks, where torchrun started them (launchers/torchrun_rank.py).
        before: status.json before the start.
        status: and after the end. Where another machine wrote it, what is seen here may be old.
    """
    started = status is not None and (before is None or status.attempt != before.attempt)
    if started and status is not None and status.exit_code is not None:
        return status.exit_code
    ends = set(ranks)
    if BAD_INPUT in ends:
        return BAD_INPUT
    if launcher == 0 and len(ends) == 1:
        return ends.pop()
    return launcher if launcher > 0 and not started else FAILED


def _run(command: Sequence[str], run: Path, environment: dict[str, str]) -> int:
    """Run `command` in a session of its own, so that a Ctrl-C reaches only us; its exit code."""
    requests: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        requests.append(number)

    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {number: signal.signal(number, note) for number in heard}
    try:
        process = subprocess.Popen(command, start_new_session=True, env=environment)
    except OSError as error:
        raise InputError(f"{command[0]} cannot be started: {error.strerror}") from error
    family: set[psutil.Process] = set()  # torchrun gives each rank a session of its own
    said = False
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(REPEAT_SECONDS)
                if code < 0:
                    _end(family, SAVING_SECONDS, lambda: requests.count(signal.SIGINT) > 1)
                return code
            with contextlib.suppress(psutil.NoSuchProcess):
                family.update(psutil.Process(process.pid).children(recursive=True))
            if requests.count(signal.SIGINT) > 1:
                process.terminate()
                _end(family, LAST_SECONDS, lambda: requests.count(signal.SIGINT) > 2)
                process.kill()
            elif requests:
                cause = signal.Signals(requests[0]).name
                _request_stop(run, f"{LAUNCHER}{cause} to {Path(command[0]).name} on {socket.gethostname()}")
                if not said:
                    said = True
                    _say(f"{cause}: asking the ranks to stop")
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        if requests and is_launchers(run / STOP_FILE):
            (run / STOP_FILE).unlink(missing_ok=True)


def _end(processes: Iterable[psutil.Process], seconds: float, hurry: Callable[[], bool]) -> None:
    """Ask processes that are not our children to end; kill those that are there after `seconds`, or in a hurry."""
    end = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    while (alive := [process for process in processes if is_alive(process)]) and time.monotonic() < end and not hurry():
        time.sleep(0.2)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs; what is dead and waits for its parent to notice does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _request_stop(run: Path, text: str) -> None:
    """Make the stop file, or renew ours; a person's is left as it is."""
    file = run / STOP_FILE
    with contextlib.suppress(OSError):  # no folder yet, or a full disk, where the empty file is enough
        if not file.exists():
            file.write_text(text, encoding="utf-8")
        elif is_launchers(file):
            os.utime(file)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone: SIGHUP
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
