"""torchrun.sh, mpirun.sh, deepspeed.sh: a signal becomes a stop with a checkpoint, the exit code is the training's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orthros_train.config import Config, config_to_yaml
from orthros_train.training.metrics import read_metrics
from tests.training.small_runs import losses, run, small_config, write_corpus

ROOT = Path(__file__).parents[2]
ALLOW = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


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
while not (run / "stop_requested").exists():
    time.sleep(0.05)
    if sys.argv[2] != "wait":
        write(sys.argv[2], int(sys.argv[3]))
        sys.exit(1)  # as launchers turn every code into
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
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


def test_a_launcher_that_cannot_start_and_one_that_starts_nothing(config: tuple[Config, str]) -> None:
    supervise = (sys.executable, "launchers/supervise.py", config[1])
    code, printed = finish(start(*supervise, "--", "no-such-launcher"))
    assert (code, printed) == (2, "error: no-such-launcher cannot be started: No such file or directory\n")
    assert finish(start(*supervise, "--", "bash", "-c", "exit 3"))[0] == 3
    assert finish(start(*supervise, "--", "true"))[0] == 1
    assert "no launcher: write -- and its command" in finish(start(*supervise))[1]


@pytest.mark.parametrize(
    ("command", "environment", "message"),
    [
        (["launchers/torchrun.sh"], {}, "no CONFIG.yaml"),
        (["launchers/torchrun.sh", "c.yaml"], {"RANK": "0"}, "a launcher has started this already"),
        (["launchers/torchrun.sh", "--nodes", "2", "c.yaml"], {}, "--nodes 2 needs --head HOST:PORT"),
        (
            ["launchers/torchrun.sh", "c.yaml"],
            {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"},
            "srun started 4 tasks on 2 nodes: start this once a node",
        ),
        (["launchers/mpirun.sh", "-n", "2"], {}, "no -- CONFIG.yaml behind mpirun's options"),
        (["launchers/mpirun.sh", "--", "c.yaml"], {"OMPI_COMM_WORLD_SIZE": "2"}, "this shell is a rank already"),
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
    assert (status["state"], status["reason"]) == ("stopped", "the file stop_requested")
    assert (folder / "checkpoints" / f"step_{status['step']:08d}" / "manifest.json").exists()
