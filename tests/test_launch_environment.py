"""Every launcher's environment becomes rank numbers, and one that contradicts itself is refused."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from orthros_train.errors import InputError
from orthros_train.launch_environment import (
    RankNumbers,
    claimed_local_rank,
    claimed_rank,
    first_host,
    job_port,
    rank_numbers,
)

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI_", "MPI_", "SLURM_", "TORCHELASTIC_")
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "20001"}
STEP = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_ID": "2",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
Environment = Callable[[dict[str, str]], None]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Sets the environment of a process without what the tests themselves were started with."""
    for name in list(os.environ):
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)

    def set_(values: dict[str, str]) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, RankNumbers()),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2"}, RankNumbers(local_rank=2)),
        (TORCHRUN, RankNumbers(3, 4, 1, "node1", 20001)),
        (STEP, RankNumbers(3, 4, 1, "node07", 20000 + (41234 + 2 * 7417) % 12000)),
        ({**STEP, "MASTER_ADDR": "login", "MASTER_PORT": "5"}, RankNumbers(3, 4, 1, "login", 5)),
        # torchrun as the one task of a node: the step's numbers count launchers
        ({**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", **TORCHRUN}, RankNumbers(3, 4, 1, "node1", 20001)),
        # torchrun as the one process of a node under mpirun
        ({**OPEN_MPI, **TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, RankNumbers(3, 4, 1, "node1", 20001)),
        # srun --mpi=pmi2
        (
            {**STEP, "PMI_RANK": "3", "PMI_SIZE": "4"},
            RankNumbers(3, 4, 1, "node07", 20000 + (41234 + 2 * 7417) % 12000),
        ),
        # a batch script without srun is one process, however many tasks the job may have
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, RankNumbers()),
    ],
)
def test_numbers(environment: Environment, values: dict[str, str], expected: RankNumbers) -> None:
    environment(values)
    assert rank_numbers() == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "set RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR: start several ranks"),
        ({**TORCHRUN, "RANK": "4"}, "RANK is 4 but WORLD_SIZE is 4"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK is '-1': it must be a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "1", **OPEN_MPI}, "mpirun started 2 processes .* says 1: unset RANK"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, "srun started 2 tasks but SLURM_PROCID, SLURM_LOCALID, SLURM_STEP_NODELIST"),
    ],
)
def test_a_contradiction_is_named(environment: Environment, values: dict[str, str], message: str) -> None:
    environment(values)
    with pytest.raises(InputError, match=message):
        rank_numbers()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (None, r"mpi4py cannot be used \(.*\); install mpi4py for this MPI"),
        (
            types.SimpleNamespace(COMM_WORLD=types.SimpleNamespace(size=1)),
            "mpi4py sees 1: it was built for another MPI; use",
        ),
    ],
)
def test_an_unusable_mpi4py_is_named(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, module: object, message: str
) -> None:
    environment(OPEN_MPI)
    package = types.SimpleNamespace(MPI=module) if module else None
    monkeypatch.setitem(sys.modules, "mpi4py", package)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=message):
        rank_numbers()


def test_export_is_what_torch_reads(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    environment(STEP)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    rank_numbers().export()
    assert {name: os.environ[name] for name in TORCHRUN} == {
        **TORCHRUN,
        "MASTER_ADDR": "node07",
        "MASTER_PORT": str(job_port(41234, 2)),
    }
    assert rank_numbers().rank == 3  # now as under torchrun


@pytest.mark.parametrize(
    ("values", "ranks"),
    [({}, (0, 0)), (TORCHRUN, (3, 1)), (STEP, (3, 1)), (OPEN_MPI, (1, 1)), ({"PMI_RANK": "5"}, (5, 0))],
)
def test_claimed_ranks(environment: Environment, values: dict[str, str], ranks: tuple[int, int]) -> None:
    environment(values)
    assert (claimed_rank(), claimed_local_rank()) == ranks


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("node1", "node1"),
        ("node[1-2]", "node1"),
        ("node[07,12-15],login1", "node07"),
        ("gpu-a,gpu-b", "gpu-a"),
        ("r[01-04]-ib", "r01-ib"),
    ],
)
def test_first_host(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


def test_steps_of_neighboring_jobs_have_ports_of_their_own() -> None:
    steps = [job_port(job, step) for job in range(40000, 40421) for step in range(20)]
    assert len(set(steps)) == len(steps)
    assert all(20000 <= job_port(job, step) < 32768 for job in (0, 11999, 19999, 10**9) for step in (0, 1, 2**32 - 1))


def test_the_first_step_has_the_port_of_the_batch_scripts() -> None:
    script = (Path(__file__).parents[1] / "launchers" / "train.sbatch").read_text(encoding="utf-8")
    assert "port=$((20000 + SLURM_JOB_ID % 12000))" in script
    assert job_port(41234) == 20000 + 41234 % 12000


PROGRAM = """
from orthros_train.launch_environment import rank_numbers
numbers = rank_numbers()
print(numbers.rank, numbers.world_size, numbers.local_rank, numbers.address, numbers.port)
"""


def test_mpirun(environment: Environment) -> None:
    """A real one: all ranks learn one meeting point."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", "2", sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env={**os.environ, **allow}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    first, second = (line.split() for line in sorted(done.stdout.splitlines()))
    assert (first[:3], second[:3]) == (["0", "2", "0"], ["1", "2", "1"])
    assert first[3:] == second[3:]
