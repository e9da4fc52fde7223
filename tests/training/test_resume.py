"""Continuing a run: bitwise in the same layout, to rounding in another, on the same samples always."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import Config
from orthros_train.data import PretrainingData
from orthros_train.training import loop
from orthros_train.training.manifest import read_manifest
from tests.distributed import run_distributed
from tests.training.small_runs import assert_same_state, losses, metrics, run, small_config, untimed

# A decay of fixed length makes the learning rate independent of train.steps, so a run can be ended by its steps.
FIXED_SCHEDULE = {"schedule__decay_steps": 16, "checkpoint__interval_steps": 10, "evaluation__interval_steps": 10}
LAYOUTS = list(itertools.product((1, 2), (1, 2, 3)))  # (ranks, ZeRO stage)


def checkpoint(config: Config, step: int) -> Path:
    return Path(config.output_dir) / "checkpoints" / f"step_{step:08d}"


def assert_halves_equal_whole(
    folder: Path, corpus: Path, world_size: int, zero_stage: int, precision: str, steps: int = 20
) -> None:
    """Losses, validation losses, learning rates, weights and moments are bitwise equal."""
    options = {"parallel__zero_stage": zero_stage, "precision": precision, "schedule__decay_steps": steps - 4}
    options |= {"checkpoint__interval_steps": steps // 2, "evaluation__interval_steps": steps // 2}
    whole = small_config(folder / "whole", corpus, train__steps=steps, **options)
    half = small_config(folder / "halves", corpus, train__steps=steps // 2, **options)
    rest = small_config(folder / "halves", corpus, train__steps=steps, **options)
    assert run(whole, world_size) == 0
    assert run(half, world_size) == 0
    assert len(losses(half)) == steps // 2
    assert run(rest, world_size) == 0
    assert untimed(rest) == untimed(whole)
    assert_same_state(checkpoint(rest, steps), checkpoint(whole, steps))


@pytest.mark.parametrize(("world_size", "zero_stage", "precision"), [(1, 2, "fp32"), (2, 1, "bf16")])
def test_twenty_steps_equal_ten_and_ten_bitwise(
    tmp_path: Path, corpus: Path, world_size: int, zero_stage: int, precision: str
) -> None:
    assert_halves_equal_whole(tmp_path, corpus, world_size, zero_stage, precision)


def test_zero3_resumes_bitwise(tmp_path: Path, corpus: Path) -> None:
    assert_halves_equal_whole(tmp_path, corpus, 2, 3, "fp32", steps=8)


@pytest.mark.evidence
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("world_size", "zero_stage"), LAYOUTS)
def test_every_layout_resumes_bitwise(
    tmp_path: Path, corpus: Path, world_size: int, zero_stage: int, precision: str
) -> None:
    assert_halves_equal_whole(tmp_path, corpus, world_size, zero_stage, precision)


def assert_relayout(
    folder: Path, corpus: Path, source: tuple[int, int], target: tuple[int, int], precision: str, **options: Any
) -> None:
    """Five steps in the source layout and five in the target one lose what ten in the source layout lose."""
    fixed = {**FIXED_SCHEDULE, "checkpoint__interval_steps": 5, "precision": precision, "schedule__decay_steps": 8}
    whole = small_config(folder / "whole", corpus, train__steps=10, parallel__zero_stage=source[1], **fixed)
    half = small_config(folder / "moved", corpus, train__steps=5, parallel__zero_stage=source[1], **fixed)
    rest = small_config(folder / "moved", corpus, train__steps=10, parallel__zero_stage=target[1], **fixed, **options)
    assert run(whole, source[0]) == 0
    assert run(half, source[0]) == 0
    assert run(rest, target[0]) == 0
    bound = 1e-5 if precision == "fp32" else 2e-3
    for key in ("loss", "grad_norm"):
        one = torch.tensor([record[key] for record in metrics(rest)])
        two = torch.tensor([record[key] for record in metrics(whole)])
        assert (one - two).abs().max() <= bound * max(1.0, two.abs().max()), key
    assert [record["learning_rate"] for record in metrics(rest)] == [r["learning_rate"] for r in metrics(whole)]
    manifest = read_manifest(checkpoint(rest, 10))
    assert (manifest.layout.world_size, manifest.layout.zero_stage) == target
    assert manifest.progress.updates == 10


@pytest.mark.parametrize(
    ("source", "target", "precision"),
    [
        ((1, 1), (2, 3), "fp32"),
        ((2, 3), (1, 2), "fp32"),
        ((2, 2), (2, 1), "bf16"),
        ((2, 1), (1, 3), "bf16"),
    ],
)
def test_resumes_in_another_layout(
    tmp_path: Path, corpus: Path, source: tuple[int, int], target: tuple[int, int], precision: str
) -> None:
    assert_relayout(tmp_path, corpus, source, target, precision)


@pytest.mark.evidence
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_every_layout_resumes_in_every_other(
    tmp_path: Path, corpus: Path, source: tuple[int, int], target: tuple[int, int], precision: str
) -> None:
    assert_relayout(tmp_path, corpus, source, target, precision)


def test_samples_do_not_depend_on_ranks_micro_batches_or_steps(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every sample read in training is logged: the order is one for all layouts, and resuming goes on where it was."""
    original = PretrainingData.sample
    log = tmp_path / "read"

    def logged(self: PretrainingData, index: int) -> Any:
        if self._key.endswith("/train"):
            with open(log, "a", encoding="utf-8") as file:
                file.write(json.dumps([index, self.sample_id(index)]) + "\n")
        return original(self, index)

    def read() -> list[Any]:
        lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        log.unlink()
        return sorted(lines)

    monkeypatch.setattr(PretrainingData, "sample", logged)
    options = {**FIXED_SCHEDULE, "data__prefetch_steps": 0}
    whole = small_config(tmp_path / "whole", corpus, train__steps=9, **options)
    assert run(whole, 1) == 0
    expected = read()
    assert [index for index, _ in expected] == list(range(9 * 8))

    parts = [(3, 1, 8), (6, 2, 1), (9, 2, 4)]  # (train.steps, ranks, micro-batch size)
    for number, (steps, ranks, micro) in enumerate(parts):
        config = small_config(tmp_path / "parts", corpus, train__steps=steps, train__micro_batch_size=micro, **options)
        assert run(config, ranks) == 0
        assert read() == expected[number * 24 : number * 24 + 24]
    assert losses(config) == pytest.approx(losses(whole), abs=1e-5)


def test_training_draws_no_random_numbers(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why a checkpoint needs no generator state."""
    states = []
    original = loop._one_step

    def noted(*arguments: Any) -> Any:
        states.append(torch.get_rng_state())
        return original(*arguments)

    def moved(config: Config) -> list[bool]:
        loop.train(config, [])
        return [not torch.equal(state, torch.get_rng_state()) for state in states]

    monkeypatch.setattr(loop, "_one_step", noted)
    config = small_config(tmp_path / "run", corpus, evaluation__interval_steps=2)
    assert run_distributed(moved, 1, config, process_group=False) == [[False] * 6]
