"""A non-finite loss or gradient on one rank, and batches without labels: skipped by all ranks together, and counted."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from orthros_train.config import Config
from orthros_train.data import PretrainingData, Sample
from orthros_train.parallel.quiet_deepspeed import deepspeed
from orthros_train.training.engine import StepResult, TrainingEngine
from orthros_train.training.plain_engine import PlainEngine
from orthros_train.training.ranks import start_ranks
from tests.distributed import run_distributed
from tests.training.small_engines import (
    RATE,
    SAMPLES,
    batch_of,
    data_parallel_engine,
    engine_config,
    full_moments,
    small_model,
    valid_labels,
)
from tests.training.small_runs import metrics, run, small_config


def spoil_loss(engine: PlainEngine, value: float) -> Callable[[], None]:
    """Make every loss `value`; returns what undoes it."""
    original = engine._training_loss
    engine._training_loss = lambda *arguments: original(*arguments) * 0.0 + value  # type: ignore[method-assign]

    def undo() -> None:
        engine._training_loss = original  # type: ignore[method-assign]

    return undo


def spoil_gradient(engine: TrainingEngine, value: float) -> Callable[[], None]:
    """Put `value` into the gradient of a layer's output, while the loss stays finite."""
    layer = engine.module.model.layers[0].mlp

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), value))

    return layer.register_forward_hook(spoil).remove


def train_with_bad_steps(config: Config, spoilers: list[tuple[Callable[..., Any], float]]) -> dict[str, Any]:
    """Three steps; before the third, one more for every spoiler, which works on rank 1 alone."""
    ranks = start_ranks(60)
    size, world = config.train.micro_batch_size, ranks.world_size
    engine = data_parallel_engine(small_model(), config, ranks)

    def step(number: int) -> StepResult:
        starts = range(ranks.rank * size, SAMPLES, size * world)
        batches = [batch_of(number, range(start, start + size)) for start in starts]
        return engine.step(batches, valid_labels(number), RATE)

    results = [step(0), step(1)]
    for number, (spoil, bad) in enumerate(spoilers):
        before = full_weights(engine)
        undo = spoil(engine, bad) if ranks.rank == 1 else lambda: None
        skipped = step(5 + number)
        undo()
        assert not skipped.applied, (spoil, bad)
        assert all(torch.equal(a, b) for a, b in zip(before, full_weights(engine), strict=True))
    results.append(step(2))
    assert all(result.applied for result in results)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "moments": full_moments(engine, "exp_avg_sq"),
    }


def full_weights(engine: TrainingEngine) -> list[torch.Tensor]:
    """The master weights, gathered from their shards."""
    return [deepspeed.utils.safe_get_full_fp32_param(p).clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_one_bad_rank_makes_all_skip_and_leaves_no_trace(zero_stage: int, precision: str) -> None:
    """After the skipped steps, everything is bitwise as if they had never been tried."""
    config = engine_config(2, zero_stage, precision)
    spoilers = [(spoil_loss, math.nan), (spoil_loss, math.inf), (spoil_gradient, math.nan), (spoil_gradient, math.inf)]
    clean = run_distributed(train_with_bad_steps, 2, config, [])
    spoiled = run_distributed(train_with_bad_steps, 2, config, spoilers)
    for one, two in zip(spoiled, clean, strict=True):
        assert one["losses"] == two["losses"]
        assert one["norms"] == two["norms"]
        assert all(torch.equal(one["moments"][name], moment) for name, moment in two["moments"].items())


def bad_loss_at(steps: range) -> Callable[..., Any]:
    """A PlainEngine.step whose losses are NaN on rank 1 in these calls (0-based)."""
    original, calls = PlainEngine.step, [0]

    def step(self: PlainEngine, *arguments: Any) -> StepResult:
        bad = calls[0] in steps and dist.get_rank() == 1
        calls[0] += 1
        undo = spoil_loss(self, math.nan) if bad else lambda: None
        try:
            return original(self, *arguments)
        finally:
            undo()

    return step


def test_skipped_steps_are_counted_and_training_goes_on(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlainEngine, "step", bad_loss_at(range(1, 3)))
    config = small_config(tmp_path / "run", corpus, train__max_consecutive_skips=3)
    assert run(config, 2) == 0
    records = metrics(config)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["skipped_steps"] for record in records] == [0, 1, 2, 2, 2, 2]
    assert [record["loss"] is None for record in records] == [False, True, True, False, False, False]
    assert [record["grad_norm"] is None for record in records] == [False, True, True, False, False, False]
    assert records[-1]["tokens_seen"] == 6 * 8 * 32


def test_too_many_skips_in_a_row_end_the_run(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(PlainEngine, "step", bad_loss_at(range(2, 100)))
    config = small_config(tmp_path / "run", corpus, train__max_consecutive_skips=3)
    assert run(config, 2) == 1
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert (status["state"], status["exit_code"], status["step"]) == ("failed", 1, 5)
    assert [record["step"] for record in metrics(config)] == [1, 2, 3, 4, 5]
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "3 steps in a row were skipped" in errors[0]


def test_a_batch_without_labels_is_a_skipped_step(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = PretrainingData.sample

    def sample(self: PretrainingData, index: int) -> Sample:
        full = original(self, index)
        empty = 16 <= index < 24 and self._key.endswith("/train")  # all of step 3
        return dataclasses.replace(full, shift_labels=full.shift_labels * 0 - 100) if empty else full

    monkeypatch.setattr(PretrainingData, "sample", sample)
    config = small_config(tmp_path / "run", corpus)
    assert run(config, 2) == 0
    records = metrics(config)
    assert [record["skipped_steps"] for record in records] == [0, 0, 1, 1, 1, 1]
    assert (records[2]["loss"], records[2]["loss_tokens"], records[2]["grad_norm"]) == (None, 0, None)
