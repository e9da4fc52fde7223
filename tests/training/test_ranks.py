"""How ranks agree, and that nobody is left waiting when one of them finds bad input."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from orthros_train.errors import InputError
from orthros_train.training.ranks import _choose_device, _refuse_shared_gpus, start_ranks
from tests.distributed import RankFailedError, run_distributed


def everything() -> dict[str, Any]:
    ranks = start_ranks(60)
    return {
        "gather": ranks.gather([ranks.rank, 0.1]).tolist(),
        "objects": ranks.gather_objects({"rank": ranks.rank}),
        "share": ranks.share(f"from {ranks.rank}"),
        "together": ranks.together(lambda: ranks.rank * 10),
        "on_main": ranks.on_main(lambda: ranks.rank),
        "is_main": ranks.is_main,
    }


@pytest.mark.parametrize("world_size", [1, 2])
def test_agreement(world_size: int) -> None:
    for rank, result in enumerate(run_distributed(everything, world_size)):
        assert result == {
            "gather": [[0.0, 0.1], [1.0, 0.1]][:world_size],
            "objects": [{"rank": number} for number in range(world_size)],
            "share": "from 0",
            "together": rank * 10,
            "on_main": 0,
            "is_main": rank == 0,
        }


def refuse_on(rank: int, collective: str) -> str:
    ranks = start_ranks(60)

    def work() -> None:
        if ranks.rank == rank:
            raise InputError("no such file")

    with pytest.raises(InputError) as error:
        getattr(ranks, collective)(work)
    return str(error.value)


@pytest.mark.parametrize(
    ("rank", "collective", "message"),
    [
        (0, "together", "no such file"),
        (1, "together", "no such file (on rank 1)"),
        (0, "on_main", "no such file"),
    ],
)
def test_bad_input_on_one_rank_is_raised_on_all(rank: int, collective: str, message: str) -> None:
    assert run_distributed(refuse_on, 2, rank, collective) == [message, message]


def test_a_half_set_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InputError, match="set RANK, WORLD_SIZE but not LOCAL_RANK, MASTER_ADDR: start several ranks"):
        start_ranks(60)


def test_one_process_needs_no_environment() -> None:
    def alone() -> tuple[int, int, str]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]
        ranks = start_ranks(60)
        return ranks.rank, ranks.world_size, str(ranks.device)

    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert run_distributed(alone, 1, process_group=False) == [(0, 1, device)]


@pytest.mark.parametrize(
    ("visible", "local_rank", "world_size", "index"),
    [(8, 3, 8, 3), (1, 3, 8, 0), (1, 0, 1, 0), (1, 1, 2, 0), (2, 0, 1, 0)],
)
def test_a_rank_takes_its_gpu_or_the_only_one_it_sees(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, world_size: int, index: int
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert _choose_device(local_rank, world_size) == torch.device("cuda", index)
    assert chosen == [index]


@pytest.mark.parametrize(("visible", "local_rank", "world_size"), [(2, 2, 4), (1, 1, 1)])
def test_more_ranks_than_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, world_size: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(InputError, match=f"LOCAL_RANK is {local_rank} but this machine shows {visible} GPUs"):
        _choose_device(local_rank, world_size)


def test_ranks_that_share_a_gpu_are_refused() -> None:
    _refuse_shared_gpus([("node1", "GPU-a"), ("node1", "GPU-b"), ("node2", "GPU-a")])
    with pytest.raises(InputError, match=r"ranks 1 and 2 have the same GPU of node1 \(GPU-b\): start one rank"):
        _refuse_shared_gpus([("node1", "GPU-a"), ("node1", "GPU-b"), ("node1", "GPU-b")])


def test_harness_reports_every_rank() -> None:
    def fail() -> None:
        raise ValueError(f"rank {os.environ['RANK']} fell over")

    with pytest.raises(RankFailedError, match=r"(?s)rank 0 raised.*rank 0 fell over.*rank 1 raised.*rank 1 fell over"):
        run_distributed(fail, 2)


def test_harness_kills_what_hangs() -> None:
    def hang() -> None:
        import time  # noqa: PLC0415

        time.sleep(600)

    with pytest.raises(RankFailedError, match="rank 0 did not finish in time and was killed"):
        run_distributed(hang, 1, timeout_seconds=0.5)


def test_a_rank_that_never_comes_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(InputError, match=r"rank 0 did not meet the other 1 at 127\.0\.0\.1:0 within"):
        start_ranks(0.5)
