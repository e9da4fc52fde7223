"""A finished step is not done again; a folder belongs to one setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluation.demo.steps import StepError, Steps
from orthros_train.errors import InputError


def test_a_finished_step_is_read_instead_of_done(tmp_path: Path) -> None:
    calls: list[int] = []

    def work(value: int) -> dict[str, Any]:
        calls.append(value)
        return {"value": value}

    assert Steps(tmp_path, {"a": 1}).run("step", "A step", work, 3)["value"] == 3
    assert Steps(tmp_path, {"a": 1}).run("step", "A step", work, 4)["value"] == 3
    assert calls == [3]


def test_a_failed_step_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {})

    def fail() -> dict[str, Any]:
        raise StepError("no")

    with pytest.raises(StepError):
        steps.run("step", "A step", fail)
    assert not (tmp_path / "results").exists()
    assert steps.run("step", "A step", dict) == {"step_seconds_total": 0.0}


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    Steps(tmp_path, {"config": "a", "ranks": 2})
    with pytest.raises(InputError, match=r"other settings \(config, text\)"):
        Steps(tmp_path, {"config": "b", "ranks": 2, "text": "t"})


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "step.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"step\.json cannot be read"):
        steps.run("step", "A step", dict)
