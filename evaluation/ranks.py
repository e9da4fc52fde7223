"""Ranks of an evaluation: each has the whole model on a device of its own, and answers its share of the documents."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch import distributed as dist

from evaluation.model_folder import torch_device
from orthros_train.errors import InputError
from orthros_train.launch_environment import environment_number

T = TypeVar("T")
LONGEST_WAIT = timedelta(weeks=52)  # for a rank whose documents take longer, as in lm-eval's `hf`


def own_device(name: str) -> torch.device:
    """This rank's device; under torchrun "cuda" is the GPU of its number.

    Raises:
        InputError: it is not there, or several ranks were given one GPU.
    """
    device = torch_device(name)
    ranks = environment_number("WORLD_SIZE", 1)
    if device.type != "cuda" or ranks == 1:
        return device
    if device.index is not None:
        raise InputError(f"device {name} would hold the models of all {ranks} ranks; give cuda, one GPU a rank")
    return torch_device(f"cuda:{environment_number('LOCAL_RANK', 0)}")


def join_ranks(device: torch.device) -> bool:
    """Join the other ranks that torchrun started, if there are any; False where that needs no group of its own."""
    if environment_number("WORLD_SIZE", 1) == 1 or dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=LONGEST_WAIT)
    return True


def from_rank_0(find: Callable[[], T]) -> T:
    """What rank 0 finds, on every rank; `find` must not fail."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return find()
    found = [find() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, src=0)
    return found[0]  # type: ignore[return-value]


def of_all_ranks(mine: T) -> list[T]:
    """Every rank's value on every rank."""
    if not dist.is_initialized():
        return [mine]
    values = [mine] * dist.get_world_size()
    dist.all_gather_object(values, mine)
    return values
