"""Ranks of an evaluation: how long they wait, which device is theirs, and what they agree on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from evaluation.lm_eval_model import OrthrosLM
from evaluation.ranks import from_rank_0, of_all_ranks, own_device
from orthros_train.errors import InputError
from tests.distributed import run_distributed
from tests.evaluation.tiny_models import save_orthros


def test_a_rank_waits_for_the_others_as_long_as_they_take(tmp_path: Path) -> None:
    """Torch's own limits are 10 minutes on GPUs and 30 on CPUs."""
    place = save_orthros(tmp_path / "model")

    def work() -> float:
        lm = OrthrosLM(str(place))
        options = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).options
        lm.leave_ranks()
        return float(options._timeout.days)

    assert run_distributed(work, 2, process_group=False) == [364, 364]


@pytest.fixture
def two_ranks_two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return monkeypatch


def test_every_rank_has_a_gpu_of_its_own(two_ranks_two_gpus: pytest.MonkeyPatch) -> None:
    assert (own_device("cuda"), own_device("cpu")) == (torch.device("cuda:1"), torch.device("cpu"))
    for name in ("cuda:0", "cuda:1"):
        with pytest.raises(InputError, match=f"device {name} would hold the models of all 2 ranks; give cuda"):
            OrthrosLM("absent", device=name)
    two_ranks_two_gpus.setenv("LOCAL_RANK", "2")
    with pytest.raises(InputError, match="the CUDA devices are 0 to 1"):
        OrthrosLM("absent", device="cuda")
    two_ranks_two_gpus.setenv("WORLD_SIZE", "1")
    assert own_device("cuda:1") == torch.device("cuda:1")


@pytest.mark.parametrize(("device", "message"), [("cuda", "torch sees no CUDA device"), ("gpu", "'gpu' is not known")])
def test_a_device_that_is_not_there_is_said_before_ranks_meet(
    device: str, message: str, two_ranks_two_gpus: pytest.MonkeyPatch
) -> None:
    two_ranks_two_gpus.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=message):
        OrthrosLM("absent", device=device)


def test_what_ranks_agree_on() -> None:
    def work() -> tuple[int, list[int]]:
        rank = dist.get_rank()
        return from_rank_0(lambda: rank + 10), of_all_ranks(rank)

    assert run_distributed(work, 2) == [(10, [0, 1])] * 2
    assert (from_rank_0(lambda: "mine"), of_all_ranks("mine")) == ("mine", ["mine"])
