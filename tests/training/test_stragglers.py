"""A slow rank is named, with its machine; noise and stages of different size are not."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from orthros_train.training import loop, stragglers
from orthros_train.training.stragglers import WINDOW_STEPS, ForwardClock, Stragglers
from tests.distributed import run_distributed
from tests.training.small_runs import small_config, write_corpus

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


def test_only_forward_passes_of_training_count() -> None:
    class Slow(nn.Module):
        def forward(self) -> None:
            time.sleep(0.02)

    module = Slow()
    clock = ForwardClock(module, torch.device("cpu"))
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
