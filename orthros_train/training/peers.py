"""Which of the other ranks still answer, to name the one that was lost.

When a collective fails, the library says that somebody did not answer, not who. Each rank therefore listens on a port
of its own for as long as it lives and accepts nothing: the kernel completes a connection without it, so a rank that is
alive but stuck answers, one that has ended refuses, and one behind a cut link does not answer at all.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

PROBE_SECONDS = 3.0
PROBES_AT_ONCE = 64
MOST_NAMED = 8
BACKLOG = 4096
NO_ANSWER, ENDED = "no answer from", "ended"


@dataclass(frozen=True)
class Peers:
    """Where the ranks of a run listen, in rank order; empty for a single one."""

    rank: int
    addresses: tuple[tuple[str, int], ...] = ()
    listener: socket.socket | None = field(default=None, repr=False)  # this rank's, open while the object lives

    @property
    def hosts(self) -> tuple[str, ...]:
        """The machine of each rank."""
        return tuple(host for host, _ in self.addresses) or (socket.gethostname(),)

    def missing(self) -> str | None:
        """The ranks that are cut off or, if none is, have ended, in words; None if all answer."""
        others = [rank for rank in range(len(self.addresses)) if rank != self.rank]
        with ThreadPoolExecutor(PROBES_AT_ONCE) as pool:
            answers = dict(zip(others, pool.map(self._probe, others), strict=True))
        for problem in (NO_ANSWER, ENDED):
            found = [rank for rank, answer in answers.items() if answer == problem]
            if found:
                return f"{problem}: {self.named(found)}"
        return None

    def named(self, ranks: Sequence[int]) -> str:
        """Some of the others with their machines, the first few by name."""
        names = ", ".join(f"rank {rank} on {self.addresses[rank][0]}" for rank in ranks[:MOST_NAMED])
        return names + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")

    def _probe(self, rank: int) -> str | None:
        try:
            socket.create_connection(self.addresses[rank], PROBE_SECONDS).close()
        except ConnectionRefusedError:
            return ENDED
        except OSError:
            return NO_ANSWER
        return None


def meet(rank: int, world_size: int, exchange: Callable[[tuple[str, int]], Sequence[tuple[str, int]]]) -> Peers:
    """Listen, and learn where the others do; collective.

    Args:
        exchange: gathers a value of every rank, in rank order.
    """
    if world_size == 1:
        return Peers(rank)
    listener = socket.create_server(("", 0), backlog=BACKLOG)
    addresses = exchange((socket.gethostname(), listener.getsockname()[1]))
    return Peers(rank, tuple(addresses), listener)
