"""Several ranks in one line: `results = run_distributed(function, 2, argument)`.

Ranks are forked from the warm test process, so they start in milliseconds instead of importing torch and DeepSpeed
again. They talk over gloo; the environment holds what a launcher would set.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

GRACE_SECONDS = 5.0  # after the first failure, for the other ranks to say what they saw
POLL_SECONDS = 0.005


class RankFailedError(AssertionError):
    """At least one rank raised, died or ran out of time; the message has every rank's story."""


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120,
    process_group: bool = True,
) -> list[Any]:
    """Call `function(*args)` on `world_size` forked ranks and return their results in rank order.

    Args:
        function: anything callable; it is inherited by fork, so closures and lambdas work. Its result must pickle.
        timeout_seconds: for all ranks together; then they are killed.
        process_group: start gloo before the call. False: leave that to the function, as under a launcher.

    Raises:
        RankFailedError: with the traceback of each rank that raised.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        port = _free_port()
        processes = start_ranks(function, world_size, args, Path(folder), port, process_group)
        codes = wait_for(processes, timeout_seconds)
        return _collect(Path(folder), codes)


def start_ranks(
    function: Callable[..., Any], world_size: int, args: tuple[Any, ...], folder: Path, port: int, process_group: bool
) -> list[int]:
    """Fork the ranks and return their process ids."""
    sys.stdout.flush()
    sys.stderr.flush()
    processes = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            _child(function, rank, world_size, args, folder, port, process_group)
        processes.append(child)
    return processes


def wait_for(processes: list[int], timeout_seconds: float) -> list[int | None]:
    """Exit codes (negative: the signal) of our own children; those that outlast the time are killed (None)."""
    deadline = time.monotonic() + timeout_seconds
    codes: dict[int, int | None] = {}
    while len(codes) < len(processes) and time.monotonic() < deadline:
        for process in processes:
            if process in codes:
                continue
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(POLL_SECONDS)
    for process in processes:
        if process not in codes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            codes[process] = None
    return [codes[process] for process in processes]


def _child(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    port: int,
    process_group: bool,
) -> None:
    code = 1
    gc.freeze()  # DeepSpeed collects garbage at every turn: leave what was inherited out of it
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world_size),
            LOCAL_WORLD_SIZE=str(world_size),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
        if process_group:
            store = dist.FileStore(str(folder / "store"), world_size)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
            )
        outcome = pickle.dumps(function(*args))
        (folder / f"result{rank}").write_bytes(outcome)
        code = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _collect(folder: Path, codes: list[int | None]) -> list[Any]:
    stories = []
    for rank, code in enumerate(codes):
        error = folder / f"error{rank}"
        if error.exists():
            stories.append(f"rank {rank} raised:\n{error.read_text(encoding='utf-8')}")
        elif code is None:
            stories.append(f"rank {rank} did not finish in time and was killed")
        elif code != 0:
            stories.append(f"rank {rank} ended with {code}")
    if stories:
        raise RankFailedError("\n".join(stories))
    return [pickle.loads((folder / f"result{rank}").read_bytes()) for rank in range(len(codes))]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
