"""The window of each step, and that it is the one the model attends through."""

from __future__ import annotations

from pathlib import Path

import pytest

from orthros_train.config_adaptation import AdaptationSection
from orthros_train.model import OrthrosConfig
from orthros_train.training.window_schedule import base_window, scheduled_window
from tests.training.small_runs import losses, metrics, run, small_config, untimed


@pytest.mark.parametrize(
    ("start", "final", "steps", "windows"),
    [
        (64, 16, 4, [64, 64, 32, 32, 16, 16]),
        (64, 8, 6, [64, 64, 32, 32, 16, 16, 8, 8]),
        (100, 30, 4, [100, 100, 50, 50, 30]),
        (9, 8, 2, [9, 9, 8]),
        (64, 8, 2, [64, 32, 8]),  # fewer steps than stages: the narrow ones are passed over
        (64, 8, 1, [64, 8, 8]),
    ],
)
def test_by_hand(start: int, final: int, steps: int, windows: list[int]) -> None:
    section = AdaptationSection(start_window=start, window_steps=steps)
    assert [scheduled_window(section, final, step) for step in range(1, len(windows) + 1)] == windows


@pytest.mark.parametrize("final", [None, 8])
def test_without_a_schedule(final: int | None) -> None:
    assert scheduled_window(AdaptationSection(), final, 1) == final


def test_the_usual_window_comes_back() -> None:
    config = OrthrosConfig(base_window=8)
    with base_window(config, 16):
        assert config.base_window == 16
    assert config.base_window == 8


def test_a_run_attends_through_it(tmp_path: Path, corpus: Path) -> None:
    """Step 1 loses what a run with the wide window loses; what is saved and validated is the narrow model."""
    options = {"schedule__type": "constant", "schedule__warmup_steps": 0, "evaluation__interval_steps": 2}
    scheduled = {"adaptation__start_window": 32, "adaptation__window_steps": 4}
    both = small_config(tmp_path / "both", corpus, **options, **scheduled)
    wide = small_config(tmp_path / "wide", corpus, **options, model__base_window=32)
    narrow = small_config(tmp_path / "narrow", corpus, **options)
    for config in (both, wide, narrow):
        assert run(config) == 0
    assert [record["base_window"] for record in metrics(both)] == [32, 32, 16, 16, 8, 8]
    assert losses(both)[:2] == losses(wide)[:2] != losses(narrow)[:2]
    assert losses(both)[2] != losses(wide)[2]
    assert "base_window" not in metrics(narrow)[0]
    saved = OrthrosConfig.from_pretrained(tmp_path / "both" / "checkpoints" / "step_00000006" / "hf")
    assert saved.base_window == 8


def test_a_pipeline_attends_through_it(tmp_path: Path, corpus: Path) -> None:
    options = {"adaptation__start_window": 32, "adaptation__window_steps": 4}
    one = small_config(tmp_path / "one", corpus, **options)
    two = small_config(tmp_path / "two", corpus, **options, parallel__pipeline=2)
    assert run(one, 1) == run(two, 2) == 0
    assert losses(one) == pytest.approx(losses(two), abs=1e-5)


def test_a_resumed_run_goes_on_with_it(tmp_path: Path, corpus: Path) -> None:
    options = {"schedule__type": "constant", "checkpoint__interval_steps": 3, "evaluation__interval_steps": 3}
    options |= {"adaptation__start_window": 32, "adaptation__window_steps": 4}
    whole = small_config(tmp_path / "whole", corpus, **options)
    half = small_config(tmp_path / "halves", corpus, train__steps=3, **options)
    rest = small_config(tmp_path / "halves", corpus, **options)
    for config in (whole, half, rest):
        assert run(config) == 0
    assert untimed(rest) == untimed(whole)
