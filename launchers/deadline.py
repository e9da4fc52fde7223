"""A check of all ranks that ends in time, whatever hangs, and says who did.

A rank whose file system or network hangs is stuck in a system call, and the others wait for it in a collective. So a
thread of each rank watches the clock: when the time is up, a rank that is at work says at what, of those that wait one
a node says for whom, and all end.
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
from orthros_train.launch_protocol import BAD_INPUT

if TYPE_CHECKING:
    from orthros_train.training.ranks import Ranks

GRACE_SECONDS = 10.0  # for those who have something to say, before the silent ones end: a launcher then kills the rest


class Deadline:
    """What this rank is doing, and the end of its patience."""

    def __init__(self, seconds: float, moment: str) -> None:
        """`seconds` count from `enforced` on; `moment` is what the rank does first, such as "importing torch"."""
        self.moment = moment
        self._seconds = seconds
        self._ranks: Ranks | None = None
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
            timer.join()  # were its thread the last to let go of the process groups, Python would abort at the end

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A block that only others can hold up: a collective."""
        self._waiting = True
        yield
        self._waiting = False  # not after an error: it may well be the others'

    def meet(self) -> Ranks:
        """All ranks of the launcher; collective. Their own time-outs are longer than this one, which names who hangs.

        Raises:
            InputError: as `start_ranks`.
        """
        from orthros_train.training.ranks import start_ranks  # noqa: PLC0415 (imports torch: seconds)

        self.moment = "meeting the other ranks"
        with self.waiting():
            self._ranks = start_ranks(2 * self._seconds)
        return self._ranks

    def wait_for_all(self, ranks: Ranks) -> None:
        """Until every rank is here; collective."""
        import torch.distributed as dist  # noqa: PLC0415

        self._meetings += 1
        ranks.raise_flag(self._flag(ranks.rank))
        with self.waiting():
            dist.barrier(group=ranks.control_group)

    def missing(self) -> str | None:
        """Who keeps this rank waiting, in words: ranks that are cut off, that have ended, or that have not come."""
        if self._ranks is None:
            return None
        found = self._ranks.peers.missing()
        if found is None and self._waiting:
            others = (rank for rank in range(self._ranks.world_size) if rank != self._ranks.rank)
            late = [rank for rank in others if not self._ranks.flag_raised(self._flag(rank))]
            found = f"busy or stuck: {self._ranks.peers.named(late)}" if late else None
        return found

    def _flag(self, rank: int) -> str:
        return f"launchers/deadline/{self._meetings}/{rank}"

    def _expire(self) -> None:
        doing = self.moment
        if self._waiting:
            if claimed_local_rank() != 0:  # one a node is enough
                time.sleep(GRACE_SECONDS)
                os._exit(BAD_INPUT)
            missing = self.missing()
            if missing is not None:
                doing = f"waiting for others ({missing})"
            elif self._ranks is None:
                doing += ", others have not come"
            else:
                doing += " together: all ranks answer and none ends"
        where = f"{socket.gethostname()}, rank {claimed_rank()}"
        sys.stdout.flush()
        print(f"error: {where}: not done after {self._seconds:g} s: {doing}", file=sys.stderr, flush=True)
        os._exit(BAD_INPUT)
