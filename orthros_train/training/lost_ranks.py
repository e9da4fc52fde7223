"""When another rank is gone or stuck: how long to wait for it, and what to say.

A rank that dies closes its connections, and whoever waits for it gets an error at once; one that is stuck, or whose
network is cut, is given up after `parallel.timeout_seconds`. Either way this rank ends with one line, and the cause is
in the log of the rank that failed first.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d

from orthros_train.training.ranks import Ranks

# gloo raises plain RuntimeErrors; those of its transport begin with the place in its sources. Its own checks, which
# fail where ranks call different things, begin with "enforce fail".
GLOO = re.compile(r"[^\[]*\[(?!enforce)[^\]]*\bgloo/[^\]]*\] ?(?P<what>.*?)(?:\. This is typically.*)?\.?")

# NCCL's own word for what happened, in torch's message. Only these two speak of another rank or the way to it; the
# others (ncclInvalidUsage, ncclInvalidArgument, ncclUnhandledCudaError, …) are this rank's own.
NCCL = re.compile(r"\bnccl(?!InProgress|Success)(?P<word>[A-Z]\w+)")
NCCL_OF_OTHERS = ("RemoteError", "SystemError")


def limit_waiting(ranks: Ranks, timeout_seconds: float) -> None:
    """Give up on a rank after `timeout_seconds` in every process group but the one that waits for disks.

    megatron-core and DeepSpeed make groups of their own, with torch's time-out of half an hour: call this after them.
    """
    for group in list(distributed_c10d._world.pg_map):
        if group is not ranks.disk_group and not distributed_c10d._rank_not_in_group(group):
            distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)


def lost_rank(
    error: BaseException, rank: int, moment: str, missing: Callable[[], str | None] = lambda: None
) -> str | None:
    """What to tell the user where `error` means that another rank was lost; None where it means something else.

    Args:
        rank: of this process.
        moment: such as "after step 12".
        missing: finds out which ranks do not answer, as `Peers.missing`.
    """
    detail = lost_detail(error, missing)
    return detail and (
        f"rank {rank} on {socket.gethostname()} lost another rank {moment} ({detail}): look at the other ranks' logs "
        "for what failed first; started again, the run resumes from its newest checkpoint"
    )


def lost_detail(error: BaseException, missing: Callable[[], str | None] = lambda: None) -> str | None:
    """Who was lost, if `missing` knows, and what the library says of it; None where `error` means something else.

    An error of this rank's own use of NCCL (two ranks on one GPU, a wrong argument, a CUDA error) is something else,
    unless another rank is indeed gone: then it may well be what this one saw of that.
    """
    text = " ".join(str(error).split())
    match = GLOO.fullmatch(text) if isinstance(error, RuntimeError) else None
    if match is None and not isinstance(error, dist.DistError):
        return None
    detail = text if match is None else match["what"]
    found = missing()
    nccl = NCCL.search(text)
    if nccl is not None and nccl["word"] not in NCCL_OF_OTHERS and found is None:
        return None
    return detail if found is None else f"{found}; {detail}"
