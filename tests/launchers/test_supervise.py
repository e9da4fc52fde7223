"""torchrun.sh, mpirun.sh, deepspeed.sh: a signal becomes a stop with a checkpoint, the exit code is the training's."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from launchers.run_records import Status
from launchers.supervise import final_code, is_alive
from orthros_train.config import Config, config_to_yaml
from orthros_train.training.metrics import read_metrics
from tests.training.small_runs import losses, run, small_config, write_corpus

ROOT = Path(__file__).parents[2]
ALLOW = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores SIGINT for them and what they start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(*command: str, **environment: str) -> subprocess.Popen[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE", "SLURM_"))}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**clean, **ALLOW, "PATH": PATH, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str], seconds: float = 180) -> tuple[int, str]:
    printed, _ = process.communicate(timeout=seconds)
    return process.returncode, printed


@pytest.fixture
def config(tmp_path: Path) -> tuple[Config, str]:
    """A run of ten steps, and its file."""
    values = small_config(tmp_path / "run", write_corpus(tmp_path, ["some words and more"] * 50), train__steps=10)
    (tmp_path / "config.yaml").write_text(config_to_yaml(values))
    return values, str(tmp_path / "config.yaml")


TRAINING = """
import json, os, pathlib, sys, time
run = pathlib.Path(sys.argv[1])
run.mkdir(exist_ok=True)
write = lambda state, code: (run / "status.json").write_text(json.dumps(
    {"state": state, "exit_code": code, "step": 1, "attempt": 2, "reason": None}))
write("running", None)
stop = run / "stop_requested"
while not stop.exists():
    time.sleep(0.05)
    if sys.argv[2] != "wait":
        write(sys.argv[2], int(sys.argv[3]))
        sys.exit(1)  # as launchers turn every code into
(run / "said").write_text(stop.read_text())
write("stopped", 75)
sys.exit(1)
"""


@pytest.fixture
def pretended(config: tuple[Config, str], tmp_path: Path) -> list[str]:
    """supervise.py with a stand-in for launcher and training, which arguments that are added steer."""
    program = tmp_path / "training.py"
    program.write_text(TRAINING)
    supervise = [sys.executable, "launchers/supervise.py", "--program=", config[1], "--"]
    return [*supervise, sys.executable, str(program), config[0].output_dir]


@pytest.mark.parametrize(
    ("arguments", "code"), [(["done", "0"], 0), (["failed", "1"], 1), (["failed", "2"], 2), (["stopped", "75"], 75)]
)
def test_the_exit_code_is_the_trainings(pretended: list[str], arguments: list[str], code: int) -> None:
    assert finish(start(*pretended, *arguments))[0] == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_becomes_a_stop_request(
    config: tuple[Config, str], pretended: list[str], number: signal.Signals
) -> None:
    run_folder = Path(config[0].output_dir)
    process = start(*pretended, "wait")
    while not (run_folder / "status.json").exists():
        time.sleep(0.02)
    process.send_signal(number)
    code, printed = finish(process)
    assert (code, printed) == (75, f"{number.name}: asking the ranks to stop\n")
    assert not (run_folder / "stop_requested").exists()
    said = (run_folder / "said").read_text()
    assert said == f"launcher: {number.name} to {Path(sys.executable).name} on {socket.gethostname()}"


def test_a_persons_stop_file_stays_a_persons(config: tuple[Config, str]) -> None:
    run_folder = Path(config[0].output_dir)
    run_folder.mkdir()
    (run_folder / "stop_requested").write_text("power cut at noon")
    process = start(sys.executable, "launchers/supervise.py", "--program=", config[1], "--", "sleep", "5")
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert (run_folder / "stop_requested").read_text() == "power cut at noon"


GRANDCHILD = """
import os, pathlib, signal, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
if sys.argv[-1] != "rank":  # the launcher: its ranks are in sessions of their own, as torchrun's
    subprocess.Popen([sys.executable, __file__, str(folder), "rank"], start_new_session=True)
else:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: (folder / "asked").touch())
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "rank")
time.sleep(600)
"""


@pytest.fixture
def grandchild(config: tuple[Config, str], tmp_path: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """supervise.py with a launcher that has a rank in another session, which outlives all but SIGKILL."""
    (tmp_path / "launcher.py").write_text(GRANDCHILD)
    command = (sys.executable, str(tmp_path / "launcher.py"), str(tmp_path))
    process = start(sys.executable, "launchers/supervise.py", "--program=", config[1], "--", *command)
    while not (tmp_path / "rank").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    return process, psutil.Process(int((tmp_path / "rank").read_text()))


def test_a_second_interrupt_leaves_no_rank_behind(
    grandchild: tuple[subprocess.Popen[str], psutil.Process], tmp_path: Path
) -> None:
    process, rank = grandchild
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    assert finish(process, 30)[0] == 1
    assert (tmp_path / "asked").exists()
    assert not is_alive(rank)


def test_ranks_whose_launcher_died_are_ended(
    grandchild: tuple[subprocess.Popen[str], psutil.Process], tmp_path: Path
) -> None:
    process, rank = grandchild
    time.sleep(3)  # until it has looked for ranks
    (launcher,) = psutil.Process(process.pid).children()
    launcher.kill()
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        time.sleep(0.02)
    assert is_alive(rank), "it has time to save a checkpoint"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert finish(process, 30)[0] == 1
    assert not is_alive(rank)


def test_a_launcher_that_cannot_start_and_one_that_starts_nothing(config: tuple[Config, str]) -> None:
    supervise = (sys.executable, "launchers/supervise.py", config[1])
    code, printed = finish(start(*supervise, "--", "no-such-launcher"))
    assert (code, printed) == (2, "error: no-such-launcher cannot be started: No such file or directory\n")
    assert finish(start(*supervise, "--", "bash", "-c", "exit 3"))[0] == 3
    assert finish(start(*supervise, "--", "true"))[0] == 1
    assert "no launcher: write -- and its command" in finish(start(*supervise))[1]


OLD, NEW = (Status("stopped", 75, 4, attempt, None) for attempt in (1, 2))
RUNNING = Status("running", None, 4, 2, None)


@pytest.mark.parametrize(
    ("launcher", "ranks", "before", "after", "code"),
    [
        (0, {0, 75}, OLD, NEW, 75),  # status.json knows best
        (1, {2}, None, None, 2),  # bad input found before there is a folder
        (1, {2}, OLD, OLD, 2),
        (0, {75}, OLD, OLD, 75),  # another machine wrote it, and this one sees the old file
        (0, {0}, OLD, RUNNING, 0),
        (1, {1}, OLD, RUNNING, 1),
        (1, {75}, OLD, RUNNING, 1),  # another rank of this machine died
        (-9, set(), OLD, RUNNING, 1),
        (3, set(), OLD, OLD, 3),  # no rank was started
        (0, set(), None, None, 1),
    ],
)
def test_the_exit_code_of_a_machine(
    launcher: int, ranks: set[int], before: Status | None, after: Status | None, code: int
) -> None:
    assert final_code(launcher, ranks, before, after) == code


SRUN = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        (["launchers/torchrun.sh"], {}, "no CONFIG.yaml"),
        (["launchers/torchrun.sh", "c.yaml"], {"RANK": "0"}, "a launcher has started this already"),
        (["launchers/torchrun.sh", "--nodes", "2", "c.yaml"], {}, "--nodes 2 needs --head HOST:PORT"),
        (["launchers/torchrun.sh", "--ranks"], {}, "--ranks needs a number"),
        (["launchers/torchrun.sh", "--ranks", ""], {}, "--ranks needs a number"),
        (["launchers/torchrun.sh", "--ranks", "c.yaml"], {}, "--ranks needs a number from 1, not c.yaml"),
        (["launchers/torchrun.sh", "--ranks", "0", "c.yaml"], {}, "--ranks needs a number from 1, not 0"),
        (["launchers/torchrun.sh", "--ranks", "2", "--nodes"], {}, "--nodes needs a number"),
        (["launchers/torchrun.sh", "--nodes", "2", "--head"], {}, "--head needs HOST:PORT"),
        (["launchers/mpirun.sh"], {}, "no -- CONFIG.yaml behind mpirun's options"),
        (["launchers/deepspeed.sh", "--num_gpus"], {}, "no -- CONFIG.yaml behind deepspeed's options"),
        (["launchers/deepspeed.sh", "--", "c.yaml"], {"PMI_SIZE": "2"}, "PMI_SIZE is set: a launcher"),
        (["launchers/mpirun.sh", "--", "c.yaml"], {"PMI_SIZE": "2"}, "PMI_SIZE is set: a launcher"),
        (["launchers/mpirun.sh", "--", "c.yaml"], SRUN, "srun started 2 tasks on 2 nodes: start this once"),
        (["launchers/deepspeed.sh", "--", "c.yaml"], SRUN, "srun started 2 tasks on 2 nodes: start this once"),
        (["launchers/torchrun.sh", "c.yaml"], SRUN, "srun started 2 tasks on 2 nodes: start this once"),
        (
            ["launchers/torchrun.sh", "--nodes", "2", "--head", "node1:29500", "c.yaml"],
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            "srun started 4 tasks on 2 nodes: start this once a node\n",
        ),
        (["launchers/mpirun.sh", "-n", "2"], {}, "no -- CONFIG.yaml behind mpirun's options"),
        (
            ["launchers/mpirun.sh", "--", "c.yaml"],
            {"OMPI_COMM_WORLD_SIZE": "2"},
            "OMPI_COMM_WORLD_SIZE is set: a",
        ),
        (["launchers/deepspeed.sh", "--"], {}, "no -- CONFIG.yaml behind deepspeed's options"),
        (["launchers/torchrun.sh", "no.yaml"], {}, "configuration file no.yaml does not exist"),
    ],
)
def test_what_cannot_work_is_one_line(command: list[str], environment: dict[str, str], message: str) -> None:
    code, printed = finish(start(*command, **environment))
    assert code == 2
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("script", ["torchrun", "mpirun", "deepspeed"])
def test_help(script: str) -> None:
    code, printed = finish(start(f"launchers/{script}.sh", "--help"))
    assert code == 0
    assert f"  launchers/{script}.sh " in printed
    assert "Exit codes: 0 done" in printed
    assert "set -" not in printed


def test_help_of_the_command_itself() -> None:
    code, printed = finish(start(sys.executable, "launchers/supervise.py", "--help"))
    assert code == 0
    assert "examples:" in printed


@pytest.mark.evidence
def test_every_launcher_trains_the_same(config: tuple[Config, str], tmp_path: Path) -> None:
    expected = config[0].model_copy(update={"output_dir": str(tmp_path / "forked")})
    assert run(expected, 2) == 0
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    local = ("--no_ssh_check", "--master_addr", "127.0.0.1")
    for name, command in {
        "torchrun": ["launchers/torchrun.sh", "--ranks", "2"],
        "mpirun": ["launchers/mpirun.sh", "--oversubscribe", "-n", "2", "--"],
        "deepspeed": ["launchers/deepspeed.sh", "--hostfile", str(tmp_path / "hosts"), *local, "--"],
    }.items():
        own = config[0].model_copy(update={"output_dir": str(tmp_path / name)})
        code, printed = finish(start(*command, config[1], f"output_dir={own.output_dir}"))
        assert code == 0, printed
        assert losses(own) == losses(expected)


@pytest.mark.evidence
def test_a_real_mpirun_stops_with_a_checkpoint(config: tuple[Config, str]) -> None:
    folder = Path(config[0].output_dir)
    process = start("launchers/mpirun.sh", "--oversubscribe", "-n", "2", "--", config[1], "train.steps=100000")
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder / "metrics.jsonl")) < 5:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75
    status = json.loads((folder / "status.json").read_text())
    expected = f"the file stop_requested (launcher: SIGTERM to mpirun on {socket.gethostname()})"
    assert (status["state"], status["reason"]) == ("stopped", expected)
    assert (folder / "checkpoints" / f"step_{status['step']:08d}" / "manifest.json").exists()


@pytest.mark.evidence
def test_two_machines_end_alike_whatever_the_head_is_called(config: tuple[Config, str], tmp_path: Path) -> None:
    """Two launchers on this machine, which is the head by an address that is not its name."""
    folder = Path(config[0].output_dir)

    def both(*overrides: str) -> list[subprocess.Popen[str]]:
        head = ("--head", f"127.0.0.1:{free_port()}")
        command = ("launchers/torchrun.sh", "--ranks", "1", "--nodes", "2", *head, config[1], *overrides)
        return [start(*command) for _ in range(2)]

    ends = [finish(process) for process in both("model.base_window=0")]
    assert [code for code, _ in ends] == [2, 2], ends
    ends = [finish(process) for process in both("data.train[0].prefix=nowhere")]  # only ranks find out
    assert [code for code, _ in ends] == [2, 2], ends
    assert not folder.exists()
    machines = both("train.steps=100000")
    while not (folder / "metrics.jsonl").exists() or len(read_metrics(folder / "metrics.jsonl")) < 5:
        assert [machine.poll() for machine in machines] == [None, None], [finish(machine) for machine in machines]
        time.sleep(0.1)
    machines[1].send_signal(signal.SIGTERM)
    ends = [finish(machine) for machine in machines]
    assert [code for code, _ in ends] == [75, 75], ends
    reason = json.loads((folder / "status.json").read_text())["reason"]
    assert re.fullmatch(r"the file stop_requested \(launcher: SIGTERM to torchrun on \S+\)", reason)
    step = json.loads((folder / "status.json").read_text())["step"]
    ends = [finish(machine) for machine in both(f"train.steps={step + 2}")]
    assert [code for code, _ in ends] == [0, 0], ends
    assert json.loads((folder / "status.json").read_text())["attempt"] == 2


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
