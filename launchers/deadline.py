"""A check of all ranks that ends in time, whatever hangs, and says who did.

A rank whose file system or network hangs is stuck in a system call, and the others wait for it in a collective. So a
thread of each rank watches the clock: when the time is up, a rank that is at work says at what, a rank that waits says
for whom, and all end.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orthros_train.launch_environment import claimed_local_rank, claimed_rank

if TYPE_CHECKING:
    from orthros_train.training.ranks import Ranks

BAD_INPUT = 2
GRACE_SECONDS = 10.0  # for those who have something to say, before the silent ones end: a launcher then kills the rest


class Deadline:
    """What this rank is doing, and the end of its patience. `ranks` is set as soon as they have met."""

    def __init__(self, seconds: float, moment: str) -> None:
        """`seconds` count from `enforced` on; `moment` is what the rank does first, such as "meeting the others"."""
        self.moment = moment
        self.ranks: Ranks | None = None
        self._seconds = seconds
        self._meetings = 0
        self._waiting = False

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """End this process with code 2 and a line on stderr if the block takes too long."""
        timer = threading.Timer(self._seconds, self._expire)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()  # or it may be the last to hold the process groups, whose destructor aborts at the exit

    def wait_for_all(self, ranks: Ranks) -> None:
        """Until every rank is here; collective."""
        import torch.distributed as dist  # noqa: PLC0415

        self._meetings += 1
        ranks.raise_flag(self._flag(ranks.rank))
        self._waiting = True
        dist.barrier(group=ranks.control_group)
        self._waiting = False

    def missing(self) -> str | None:
        """Who keeps this rank waiting, in words: ranks that are cut off, that have ended, or that have not come."""
        if self.ranks is None:
            return None
        found = self.ranks.peers.missing()
        if found is None and self._waiting:
            others = (rank for rank in range(self.ranks.world_size) if rank != self.ranks.rank)
            late = [rank for rank in others if not self.ranks.flag_raised(self._flag(rank))]
            found = f"busy or stuck: {self.ranks.peers.named(late)}" if late else None
        return found

    def _flag(self, rank: int) -> str:
        return f"launchers/deadline/{self._meetings}/{rank}"

    def _expire(self) -> None:
        if self._waiting and claimed_local_rank() != 0:  # one a node is enough
            time.sleep(GRACE_SECONDS)
            os._exit(BAD_INPUT)
        doing = f"waiting for others ({self.missing() or 'all have come'})" if self._waiting else self.moment
        where = f"{socket.gethostname()}, rank {claimed_rank()}"
        sys.stdout.flush()
        print(f"error: {where}: not done after {self._seconds:g} s: {doing}", file=sys.stderr, flush=True)
        os._exit(BAD_INPUT)
