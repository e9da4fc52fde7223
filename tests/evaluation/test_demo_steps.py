"""A finished step is not done again; a folder belongs to one setting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evaluation import machine
from evaluation.demo.steps import DEFAULT_FOLDER, StepError, Steps
from orthros_train.errors import InputError
from orthros_train.training import run_folder


def test_a_finished_step_is_read_instead_of_done(tmp_path: Path) -> None:
    calls: list[int] = []

    def work(value: int) -> dict[str, Any]:
        calls.append(value)
        return {"value": value}

    assert Steps(tmp_path, {"a": 1}).run("step", "A step", work, 3) == {"value": 3}
    assert Steps(tmp_path, {"a": 1}).run("step", "A step", work, 4) == {"value": 3}
    assert calls == [3]


def test_a_step_keeps_on_what_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = iter(["first", "second"])
    loads = iter([0.5, 1.5, 2.5, 3.5])
    monkeypatch.setattr(run_folder, "git_commit", lambda: next(commits))
    monkeypatch.setattr(machine, "load_average", lambda: next(loads))
    before = Steps(tmp_path, {})
    before.run("a", "A", dict)
    later = Steps(tmp_path, {})
    later.run("a", "A", dict)
    later.run("b", "B", dict)
    assert later.measured["a"] == before.measured["a"]
    assert [later.measured[name]["machine"]["commit"] for name in "ab"] == ["first", "second"]
    assert [later.measured[name]["load_average"] for name in "ab"] == [[0.5, 1.5], [2.5, 3.5]]
    assert 0 <= later.measured["b"]["seconds"] < 60


def test_the_load_is_the_last_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.os, "getloadavg", lambda: (1.234, 2.0, 3.0))
    assert machine.load_average() == 1.23

    def fail() -> None:
        raise OSError

    monkeypatch.setattr(machine.os, "getloadavg", fail)
    assert machine.load_average() is None


def test_a_failed_step_leaves_nothing_and_is_done_again(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {})

    def fail() -> dict[str, Any]:
        raise StepError("no")

    with pytest.raises(StepError):
        steps.run("step", "A step", fail)
    assert not (tmp_path / "results").exists()
    assert steps.run("step", "A step", lambda: {"value": 1}) == {"value": 1}


def test_other_settings_need_another_folder(tmp_path: Path) -> None:
    Steps(tmp_path, {"config": "a", "ranks": 2}).run("step", "A step", dict)
    with pytest.raises(InputError, match=rf"other settings \(config, text\).*--output OTHER.*`?rm -r {tmp_path}$"):
        Steps(tmp_path, {"config": "b", "ranks": 2, "text": "t"})


def test_the_remedy_for_the_default_folder_is_make_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = (Path(__file__).parents[2] / "Makefile").read_text(encoding="utf-8").partition("\nclean:")[2]
    assert f"rm -rf {DEFAULT_FOLDER} " in clean
    monkeypatch.chdir(tmp_path)
    Steps(DEFAULT_FOLDER, {"text": "shakespeare"}).run("step", "A step", dict)
    with pytest.raises(InputError, match=r"other settings \(text\).*--output OTHER.*`make clean`$"):
        Steps(DEFAULT_FOLDER, {"text": "mine.txt"})


def test_a_demo_that_failed_at_once_does_not_occupy_the_folder(tmp_path: Path) -> None:
    def fail() -> dict[str, Any]:
        raise InputError("cannot read typo.txt")

    with pytest.raises(InputError, match="typo"):
        Steps(tmp_path, {"text": "typo.txt"}).run("text", "Text", fail)
    assert Steps(tmp_path, {"text": "mine.txt"}).run("text", "Text", dict) == {}


def test_a_result_that_does_not_say_where_it_is_from_is_refused(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "step.json").write_text('{"value": 1, "step_seconds_total": 2.0}', encoding="utf-8")
    with pytest.raises(InputError, match=r"step\.json does not say on what it was measured.*rm -r .* and run again"):
        steps.run("step", "A step", dict)


def test_a_damaged_result_is_named(tmp_path: Path) -> None:
    steps = Steps(tmp_path, {})
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "step.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match=r"step\.json cannot be read"):
        steps.run("step", "A step", dict)
