"""A made-up regression is found, noise is not one, and unlike results are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import main
from orthros_train.errors import InputError

RESULT: dict[str, Any] = {
    "benchmark": "prefill",
    "settings": {"threads": 2},
    "machine": {"processor": "P", "cores": 2, "versions": {"torch": "2.13"}, "commit": "abc"},
    "records": [
        {"case": "orthros 64", "seconds": 2.0, "all_seconds": [1.9, 2.0, 2.1], "peak_growth_mib": 100.0},
        {"case": "llama 64", "seconds": 4.0, "all_seconds": [3.9, 4.0, 4.1]},
    ],
}


def write(path: Path, *changes: tuple[tuple[str | int, ...], Any]) -> Path:
    """RESULT with values replaced at the places named."""
    content = copy.deepcopy(RESULT)
    for place, value in changes:
        entry: Any = content
        for key in place[:-1]:
            entry = entry[key]
        entry[place[-1]] = value
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def seconds(*values: float) -> list[tuple[tuple[str | int, ...], Any]]:
    return [
        (("records", 0, "all_seconds"), list(values)),
        (("records", 0, "seconds"), sorted(values)[len(values) // 2]),
    ]


def run(tmp_path: Path, *changes: tuple[tuple[str | int, ...], Any], options: tuple[str, ...] = ()) -> int:
    old, new = write(tmp_path / "old.json"), write(tmp_path / "new.json", *changes)
    return main([str(old), str(new), *options])


def test_equal_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.count("1.000") == 3
    assert "outside" not in shown


def test_a_regression_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *seconds(2.4, 2.5, 2.6)) == 1
    shown = capsys.readouterr().out
    assert "1.250" in shown
    assert shown.count("REGRESSION") == 1
    assert "1 worse by more than 10%" in shown


def test_the_tolerance(tmp_path: Path) -> None:
    assert run(tmp_path, *seconds(2.4, 2.5, 2.6), options=("--tolerance", "0.3")) == 0


def test_what_the_spread_explains_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *seconds(2.05, 2.5, 2.6)) == 0
    assert "1.250" in capsys.readouterr().out


def test_faster_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *seconds(0.9, 1.0, 1.1)) == 0
    assert "outside" in capsys.readouterr().out


def test_more_memory_is_one(tmp_path: Path) -> None:
    assert run(tmp_path, (("records", 0, "peak_growth_mib"), 150.0)) == 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("benchmark",), "decode", "differ in benchmark 'prefill' and 'decode'"),
        (("settings", "threads"), 1, "settings.threads 2 and 1"),
        (("settings", "new"), 1, "settings.new None and 1"),
        (("machine", "processor"), "Q", "machine.processor 'P' and 'Q'"),
    ],
)
def test_unlike_results_are_refused(tmp_path: Path, place: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path, (place, value))
    assert run(tmp_path, (place, value), options=("--force",)) == 0


def test_versions_and_cases_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, (("machine", "commit"), "def"), (("records", 1, "case"), "llama 65")) == 0
    shown = capsys.readouterr().out
    assert "commit: abc and def" in shown
    assert "only in the old result: llama 64" in shown
    assert "only in the new result: llama 65" in shown


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write(folder / "a.json")
    write(old / "b.json")
    write(new / "c.json")
    assert main([str(old), str(new)]) == 0
    shown = capsys.readouterr().out
    assert f"only in {old}: b.json" in shown
    assert f"only in {new}: c.json" in shown
    write(new / "b.json", *seconds(9.0))
    assert main([str(old), str(new)]) == 1


def test_bad_input(tmp_path: Path) -> None:
    file, folder = write(tmp_path / "a.json"), tmp_path / "folder"
    folder.mkdir()
    other = write(tmp_path / "b.json", (("records",), [{"case": "else", "seconds": 1.0}]))
    for arguments, message in (
        ([file, folder], "a file and a folder"),
        ([folder, tmp_path], "no result of the same name"),
        ([file, other], "no figure of the same case in common"),
        ([file, tmp_path / "absent.json"], "cannot be read as a benchmark's result"),
        ([file, file, "--tolerance", "-1"], "must not be negative"),
    ):
        with pytest.raises(InputError, match=message):
            main([str(argument) for argument in arguments])
