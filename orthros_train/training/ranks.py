"""The ranks of a run and how they agree.

* Rank numbers come from the launcher (orthros_train/launch_environment.py); without one the run is one process and
  needs no port.
* Tensors travel over the default group (nccl, or gloo on CPUs). Small decisions travel over a gloo group, so agreeing
  on a stop or on a token count never waits for the GPU.
* Waiting for another rank's disk goes over a third group whose time-out is a day: a save slower than the collective
  time-out survives, while a rank that dies is noticed at once through its closed connection.
* Bad input found on one rank is raised on all, so nobody is left waiting in a collective.
"""

from __future__ import annotations

import atexit
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from orthros_train.errors import InputError
from orthros_train.launch_environment import environment_number, rank_numbers
from orthros_train.training.peers import Peers, meet

T = TypeVar("T")
Errors = tuple[type[Exception], ...]  # whose constructors take the message alone
Problem = tuple[type[Exception], str]

DISK_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True)
class Ranks:
    """This process among all ranks of the run."""

    rank: int
    world_size: int
    device: torch.device
    control_group: Any  # gloo: decisions and sums of a few numbers
    disk_group: Any  # gloo with a day's time-out: waiting for files
    peers: Peers  # who of the others still answers

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes to the terminal and to the run folder's own files."""
        return self.rank == 0

    def gather(self, values: Sequence[float]) -> torch.Tensor:
        """Every rank's `values`, as a (world_size, len(values)) float64 tensor on the CPU, the same on all ranks."""
        mine = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.world_size == 1:
            return mine[None]
        rows = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(rows, mine, group=self.control_group)
        return torch.stack(rows)

    def gather_objects(self, value: T) -> list[T]:
        """Every rank's picklable `value`; waits as long as the slowest disk takes."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.disk_group)
        return values  # type: ignore[return-value]

    def share(self, value: T) -> T:
        """Rank 0's picklable `value`, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.disk_group)
        return box[0]

    def together(self, work: Callable[[], T], errors: Errors = (InputError,)) -> T:
        """Run `work` on every rank; if it raises one of `errors` on any, raise the lowest such rank's on all."""
        result, problem = _attempt(work, errors)
        _raise_first(self.gather_objects(problem))
        return result  # type: ignore[return-value]

    def on_main(self, work: Callable[[], T], errors: Errors = (InputError,)) -> T:
        """Run `work` on rank 0 alone and give every rank its result, or its exception if it is one of `errors`."""
        outcome = _attempt(work, errors) if self.is_main else (None, None)
        result, problem = self.share(outcome)
        _raise_first([problem])
        return result  # type: ignore[return-value]

    def raise_flag(self, name: str) -> None:
        """Let every rank see, whenever it looks, that this one has raised the flag; not collective."""
        if self.world_size > 1:
            distributed_c10d._get_default_store().set(name, "1")

    def flag_raised(self, name: str) -> bool:
        """Whether any rank has raised the flag so far; asks rank 0's store, a fraction of a millisecond."""
        return self.world_size > 1 and distributed_c10d._get_default_store().check([name])


def _raise_first(problems: Sequence[Problem | None]) -> None:
    for rank, problem in enumerate(problems):
        if problem is not None:
            kind, message = problem
            raise kind(message if rank == 0 else f"{message} (on rank {rank})")


def _attempt(work: Callable[[], T], errors: Errors) -> tuple[T | None, Problem | None]:
    try:
        return work(), None
    except errors as error:
        return None, (type(error), str(error))


def start_ranks(timeout_seconds: float) -> Ranks:
    """Join the run's process groups (once a process) and choose this rank's device.

    Raises:
        InputError: as `rank_numbers`, a rank has no GPU of its own, or not all ranks come.
    """
    rank, world_size, local_rank = _launcher_numbers()
    device = _choose_device(local_rank, world_size)
    timeout = timedelta(seconds=timeout_seconds)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        if world_size > 1:
            _join(backend, timeout, rank, world_size)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(_leave)
    # DeepSpeed reads it, to choose the same GPU
    os.environ["LOCAL_RANK"] = str(local_rank if device.index is None else device.index)
    control_group = dist.new_group(backend="gloo", timeout=timeout)

    def exchange(value: Any) -> list[Any]:
        values: list[Any] = [None] * world_size
        dist.all_gather_object(values, value, group=control_group)
        return values

    if device.type == "cuda" and world_size > 1:
        _refuse_shared_gpus(exchange((socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid))))
    return Ranks(
        rank=rank,
        world_size=world_size,
        device=device,
        control_group=control_group,
        disk_group=dist.new_group(backend="gloo", timeout=DISK_TIMEOUT),
        peers=meet(rank, world_size, exchange),
    )


def _join(backend: str, timeout: timedelta, rank: int, world_size: int) -> None:
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        place = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        reason = str(error).split("\n", 1)[0]
        raise InputError(
            f"rank {rank} did not meet the other {world_size - 1} at {place} within "
            f"{timeout.total_seconds():g} s ({reason}); look at the logs of those that did not come"
        ) from error


def _launcher_numbers() -> tuple[int, int, int]:
    """(rank, world size, local rank) as the launcher, or a process group that is already up, has them."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size(), environment_number("LOCAL_RANK", dist.get_rank())
    numbers = rank_numbers()
    numbers.export()
    return numbers.rank, numbers.world_size, numbers.local_rank


def _choose_device(local_rank: int, world_size: int) -> torch.device:
    """This rank's GPU by its number on the machine, or the only one that it sees: `srun --gpus-per-task=1` shows each
    task its own."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    index = 0 if visible == 1 and world_size > 1 else local_rank
    if index >= visible:
        raise InputError(
            f"LOCAL_RANK is {local_rank} but this machine shows {visible} GPUs: start at most one rank a GPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _refuse_shared_gpus(gpus: Sequence[tuple[str, str]]) -> None:
    """Raise InputError if two ranks, given by (machine, GPU's UUID) in rank order, have one GPU; NCCL would fail."""
    first: dict[tuple[str, str], int] = {}
    for rank, gpu in enumerate(gpus):
        if first.setdefault(gpu, rank) != rank:
            raise InputError(
                f"ranks {first[gpu]} and {rank} have the same GPU of {gpu[0]} ({gpu[1]}): start one rank a GPU, which "
                "sees all GPUs of its machine, or its own alone"
            )


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
