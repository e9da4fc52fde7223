"""Which launcher started this process, and what it says of the process's rank.

| launcher               | rank                 | ranks                | rank on this machine       |
| ---------------------- | -------------------- | -------------------- | -------------------------- |
| torchrun, deepspeed    | RANK                 | WORLD_SIZE           | LOCAL_RANK                 |
| mpirun of Open MPI     | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE | OMPI_COMM_WORLD_LOCAL_RANK |
| mpirun of MPICH, Intel | PMI_RANK             | PMI_SIZE             | MPI_LOCALRANKID            |
| srun, one task a rank  | SLURM_PROCID         | SLURM_STEP_NUM_TASKS | SLURM_LOCALID              |

They meet at MASTER_ADDR and MASTER_PORT; under mpirun they agree on these through mpi4py, under srun it is the first
node of the step and a port made of its ids.

The first line that has more than one process counts: torchrun and mpirun themselves run inside SLURM steps, whose
variables then count launchers, not ranks. Only what is needed for that is imported; torch is not.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

from orthros_train.errors import InputError

FIRST_PORT, PORTS = 20000, 12000  # a job's port: FIRST_PORT + its id modulo PORTS, below Linux's own from 32768 on
STEP_PORTS = 7417  # between a job's steps: PORTS / golden ratio, and prime, so that steps fall far from each other
MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
SRUN_SIZE = "SLURM_STEP_NUM_TASKS"
_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")


@dataclass(frozen=True)
class RankNumbers:
    """One process of several, and where they meet. `address` is None where nobody has to meet, in a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str | None = None
    port: int | None = None

    def export(self) -> None:
        """Set the variables that torch.distributed and DeepSpeed read."""
        os.environ.setdefault("LOCAL_RANK", str(self.local_rank))
        if self.address is not None:
            values = (self.rank, self.world_size, self.local_rank, self.address, self.port)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
            os.environ.update(dict(zip(names, map(str, values), strict=True)))


def claimed_rank() -> int:
    """This process's rank by the first variable that is set, 0 without one; enough to choose who prints."""
    return _first_number("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def claimed_local_rank() -> int:
    """The same for its rank on this machine."""
    return _first_number("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


def rank_numbers() -> RankNumbers:
    """What the launcher says of this process; under mpirun a collective call.

    Raises:
        InputError: the environment is incomplete or contradicts itself.
    """
    mpi = next((name for name in MPI_SIZES if environment_number(name, 1) > 1), None)
    if "WORLD_SIZE" in os.environ or "RANK" in os.environ:
        return _from_torch(mpi)
    tasks = environment_number(SRUN_SIZE, 1)
    srun_alone = mpi == "PMI_SIZE" and environment_number(mpi, 1) == tasks  # as srun --mpi=pmi2 sets it
    if mpi is not None and not srun_alone:
        return _from_mpi(mpi)
    if tasks > 1:
        return _from_srun(tasks)
    return RankNumbers(local_rank=environment_number("LOCAL_RANK", 0))


def environment_number(variable: str, default: int) -> int:
    """The whole number in an environment variable. Raises InputError for anything else."""
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise InputError(
            f"the environment variable {variable} is '{text}': it must be a whole number; correct or unset it"
        )
    return int(text)


def job_port(job_id: int, step_id: int = 0) -> int:
    """The port on which the ranks of a SLURM step meet.

    Jobs and steps that share a machine have different ones: two of the first 20 steps of any jobs have the same port
    only if the jobs' ids are at least 421 apart (modulo PORTS).
    """
    return FIRST_PORT + (job_id + step_id * STEP_PORTS) % PORTS


def first_host(node_list: str) -> str:
    """The first host of a list as SLURM writes it: node[07-09,12],login1 -> node07."""
    match = re.match(r"([^,\[]+)(?:\[(\w+)[^\]]*\])?([^,\[]*)", node_list)
    if match is None:
        raise InputError(f"SLURM_STEP_NODELIST is '{node_list}': it names no host")
    return "".join(part or "" for part in match.groups())


def _first_number(*variables: str) -> int:
    return next((environment_number(name, 0) for name in variables if name in os.environ), 0)


def _from_torch(mpi: str | None) -> RankNumbers:
    size = environment_number("WORLD_SIZE", 1)
    if mpi is not None and "TORCHELASTIC_RUN_ID" not in os.environ and size != environment_number(mpi, 1):
        raise InputError(
            f"mpirun started {os.environ[mpi]} processes ({mpi}), but WORLD_SIZE of the environment says {size}: "
            "unset RANK, WORLD_SIZE and LOCAL_RANK, or start without mpirun"
        )
    if size == 1:
        return RankNumbers(local_rank=environment_number("LOCAL_RANK", 0))
    present = [name for name in _TORCH[:3] if name in os.environ]
    missing = [name for name in _TORCH if name not in os.environ]
    if missing:
        raise InputError(
            f"the launcher set {', '.join(present)} but not {', '.join(missing)}: "
            "start several ranks with torchrun, or unset these variables to train in one process"
        )
    rank = environment_number("RANK", 0)
    if rank >= size:
        raise InputError(f"RANK is {rank} but WORLD_SIZE is {size}: ranks count from 0; correct one of them")
    return RankNumbers(
        rank,
        size,
        environment_number("LOCAL_RANK", 0),
        os.environ["MASTER_ADDR"],
        environment_number("MASTER_PORT", 29500),
    )


def _from_srun(size: int) -> RankNumbers:
    missing = [name for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST") if name not in os.environ]
    if missing:
        raise InputError(f"srun started {size} tasks but {', '.join(missing)} is not set; start with srun or torchrun")
    port = job_port(environment_number("SLURM_JOB_ID", 0), environment_number("SLURM_STEP_ID", 0))
    return RankNumbers(
        environment_number("SLURM_PROCID", 0),
        size,
        environment_number("SLURM_LOCALID", 0),
        os.environ.get("MASTER_ADDR", first_host(os.environ["SLURM_STEP_NODELIST"])),
        environment_number("MASTER_PORT", port),
    )


def _from_mpi(size_name: str) -> RankNumbers:
    """Agree on where to meet over MPI, which is then left: training talks over NCCL or gloo only."""
    size = environment_number(size_name, 1)
    try:
        from mpi4py import MPI  # noqa: PLC0415  starts MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"mpirun started {size} processes, but mpi4py cannot be used ({error}); install mpi4py for this MPI, "
            "or start with torchrun"
        ) from error
    world = MPI.COMM_WORLD
    if world.size != size:
        raise InputError(
            f"mpirun started {size} processes ({size_name}), but mpi4py sees {world.size}: it was built for another "
            "MPI; use the mpirun of the same environment, or start with torchrun"
        )
    rank, local_rank = world.rank, world.Split_type(MPI.COMM_TYPE_SHARED).rank
    address, port = world.bcast(_own_meeting_point() if rank == 0 else None)
    MPI.Finalize()
    return RankNumbers(rank, size, local_rank, address, port)


def _own_meeting_point() -> tuple[str, int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        return socket.gethostname(), int(listener.getsockname()[1])
