"""A slow rank is named, with its machine; noise and stages of different size are not."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orthros_train.config import Config
from orthros_train.training import engine, loop, stragglers
from orthros_train.training.stragglers import WINDOW_STEPS, ForwardClock, Stragglers
from tests.distributed import run_distributed
from tests.training.small_runs import metrics, small_config, write_corpus

HOSTS = ("node1", "node1", "node2", "node2")


def describe(seconds: list[float], stages: tuple[int, ...] = (0, 0, 0, 0), steps: int = WINDOW_STEPS) -> str | None:
    watched = Stragglers(HOSTS, stages)
    for _ in range(steps):
        watched.add(seconds)
    return watched.describe()


def test_a_slow_rank_is_named() -> None:
    expected = "slow in its own forward passes: rank 2 on node2 (0.90 s a step, usual are 0.40 s)"
    assert describe([0.4, 0.4, 0.9, 0.41]) == expected


@pytest.mark.parametrize(
    ("seconds", "stages"),
    [
        ([0.4, 0.4, 0.5, 0.4], (0, 0, 0, 0)),  # a little slower
        ([0.010, 0.010, 0.030, 0.010], (0, 0, 0, 0)),  # a multiple of next to nothing
        ([0.4, 0.9, 0.4, 0.9], (0, 1, 0, 1)),  # the second stage is the larger one
    ],
)
def test_what_is_no_straggler(seconds: list[float], stages: tuple[int, ...]) -> None:
    assert describe(seconds, stages) is None


def test_it_takes_a_full_window_and_most_of_it() -> None:
    assert describe([0.4, 0.4, 0.9, 0.4], steps=WINDOW_STEPS - 1) is None
    watched = Stragglers(HOSTS, (0, 0, 0, 0))
    for step in range(WINDOW_STEPS):
        watched.add([0.4, 0.4, 9.0 if step % 3 == 0 else 0.4, 0.4])
    assert watched.describe() is None


def test_the_slowest_is_slow_beside_ranks_of_its_own_stage() -> None:
    assert Stragglers(HOSTS, (0, 0, 0, 0)).slowest([0.4, 0.4, 0.9, 0.4]) == 2
    assert Stragglers(HOSTS, (0, 1, 0, 1)).slowest([0.4, 0.9, 0.5, 0.9]) == 2  # the second stage is the larger one
    assert Stragglers(HOSTS[:1], (0,)).slowest([0.0]) == 0


def test_only_forward_passes_of_training_count() -> None:
    class Slow(nn.Module):
        def forward(self) -> None:
            time.sleep(0.02)

    module = Slow()
    clock = ForwardClock([module], torch.device("cpu"))
    module.eval()
    module()
    module.train()
    assert clock.take() == 0
    module()
    module()
    assert 0.04 <= clock.take() < 1
    assert clock.take() == 0


def test_a_training_names_its_slow_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(tmp_path / "run", write_corpus(tmp_path, ["some words and more"] * 50))
    monkeypatch.setattr(stragglers, "WINDOW_STEPS", 5)  # of the six steps
    config.logging.interval_steps = 5
    pretended = ForwardClock.take

    def slow_on_rank_1(clock: ForwardClock) -> float:
        return pretended(clock) + torch.distributed.get_rank() * 10

    monkeypatch.setattr(ForwardClock, "take", slow_on_rank_1)
    assert run_distributed(loop.train, 2, config, ["test"], process_group=False) == [0, 0]
    assert "warning: step 5: slow in its own forward passes: rank 1 on " in capfd.readouterr().out
    for record in metrics(config):
        assert record["slowest_rank"] == 1
        assert record["slowest_host"] == socket.gethostname()
        assert record["forward_seconds_max"] > 10
        assert 0 < record["forward_seconds_min"] < 5
        assert record["forward_seconds_median"] == pytest.approx(
            (record["forward_seconds_min"] + record["forward_seconds_max"]) / 2
        )


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_a_rank_that_computes_slowly_is_named_under_every_zero_stage(
    zero_stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under ZeRO-3 rank 0 waits for rank 1's share of the weights inside its own forward passes."""
    corpus = write_corpus(tmp_path, ["some words and more"] * 50)
    config = small_config(tmp_path / "run", corpus, parallel__zero_stage=zero_stage, logging__interval_steps=5)
    usual = engine.deepspeed_config

    def gathers_each_layer_when_it_begins(config: Config, accumulation_steps: int) -> dict[str, Any]:
        """As a large model: of a small one, ZeRO-3 gathers everything ahead, and keeps it."""
        settings = usual(config, accumulation_steps)
        names = ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance")
        settings["zero_optimization"].update({f"stage3_{name}": 0 for name in names})
        return settings

    monkeypatch.setattr(engine, "deepspeed_config", gathers_each_layer_when_it_begins)
    monkeypatch.setattr(stragglers, "WINDOW_STEPS", 5)
    forward = nn.Linear.forward

    def slow_on_rank_1(module: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01 * torch.distributed.get_rank())
        return forward(module, inputs)

    monkeypatch.setattr(nn.Linear, "forward", slow_on_rank_1)
    assert run_distributed(loop.train, 2, config, ["test"], process_group=False) == [0, 0]
    assert "warning: step 5: slow in its own forward passes: rank 1 on " in capfd.readouterr().out
    assert {record["slowest_rank"] for record in metrics(config)} == {1}
