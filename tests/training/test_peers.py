"""A lost rank is named: one that has ended, one behind a cut link, but not one that is merely stuck."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import pytest

from orthros_train.training import peers
from orthros_train.training.lost_ranks import lost_rank
from orthros_train.training.peers import Peers, meet
from orthros_train.training.ranks import start_ranks
from tests.distributed import run_distributed

HOST = socket.gethostname()
UNREACHABLE = ("192.0.2.1", 9)


def test_ranks_that_are_alive_answer_even_while_they_are_stuck() -> None:
    def look() -> str | None:
        ranks = start_ranks(60)
        if ranks.rank == 1:
            time.sleep(1.0)  # stuck: it accepts nothing
            return None
        return ranks.peers.missing()

    assert run_distributed(look, 2) == [None, None]


def test_a_rank_that_has_ended_is_named() -> None:
    def look() -> str | None:
        ranks = start_ranks(60)
        if ranks.rank == 1:
            assert ranks.peers.listener is not None
            ranks.peers.listener.close()  # as the kernel does when a process dies
            ranks.gather([0])
            return None
        ranks.gather([0])
        return ranks.peers.missing()

    assert run_distributed(look, 2)[0] == f"ended: rank 1 on {HOST}"


@pytest.fixture
def closed() -> tuple[str, int]:
    """Where nobody listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
    return str(address[0]), int(address[1])


def test_a_cut_link_comes_before_ranks_that_ended_because_of_it(
    closed: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = socket.create_connection

    def connect_or_wait(address: tuple[str, int], seconds: float) -> socket.socket:
        if address == UNREACHABLE:
            raise TimeoutError("timed out")
        return connect(address, seconds)

    monkeypatch.setattr(peers.socket, "create_connection", connect_or_wait)
    assert Peers(0, (("here", 1), closed, UNREACHABLE)).missing() == "no answer from: rank 2 on 192.0.2.1"
    assert Peers(0, (("here", 1), closed)).missing() == "ended: rank 1 on 127.0.0.1"


def test_many_are_counted(closed: tuple[str, int]) -> None:
    missing = Peers(0, (("here", 1), *[closed] * 20)).missing()
    assert missing is not None
    assert missing.endswith("rank 8 on 127.0.0.1 and 12 more")


def test_a_single_rank_has_no_peers_and_opens_no_port() -> None:
    def never(value: tuple[str, int]) -> Sequence[tuple[str, int]]:
        raise AssertionError

    alone = meet(0, 1, never)
    assert (alone.missing(), alone.listener) == (None, None)


def test_the_line_about_a_lost_rank_names_it() -> None:
    error = RuntimeError(
        "[/src/gloo/transport/tcp/pair.cc:12] Timed out waiting 20000ms for recv operation to complete"
    )
    line = lost_rank(error, 0, "after step 5", lambda: "no answer from: rank 2 on node2")
    assert line is not None
    assert "lost another rank after step 5 (no answer from: rank 2 on node2; Timed" in line
