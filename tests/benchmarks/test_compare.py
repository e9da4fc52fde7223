"""A made-up regression is found, noise is not one, and unlike results are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare import MORE_IS_BETTER, main
from orthros_train.errors import InputError

RESULT: dict[str, Any] = {
    "benchmark": "prefill",
    "settings": {"threads": 2},
    "machine": {"processor": "P", "cores": 2, "versions": {"torch": "2.13"}, "commit": "abc"},
    "records": [
        {
            "case": "orthros 64",
            "arm": "orthros",
            "seconds": 2.0,
            "all_seconds": [1.9, 2.0, 2.1],
            "over_peer": 0.5,
            "all_over_peer": [0.49, 0.5, 0.51],
            "peak_growth_mib": 100.0,
        },
        {
            "case": "llama 64",
            "arm": "llama",
            "seconds": 4.0,
            "all_seconds": [3.9, 4.0, 4.1],
            "speedup": 0.6,
            "share": 0.6,
        },
        {"case": "orthros 32", "arm": "orthros", "seconds": 2.0, "all_seconds": [1.9, 2.0, 2.1], "growth": None},
    ],
}

SLOWER_THAN_ITS_PEER = (
    (("records", 0, "over_peer"), 0.625),
    (("records", 0, "all_over_peer"), [0.62, 0.625, 0.63]),
)


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


def alone(*values: float) -> list[tuple[tuple[str | int, ...], Any]]:
    """Times of the case without a peer."""
    return [(("records", 2, name), value) for (*_, name), value in seconds(*values)]


def test_equal_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.count("1.000") == 7
    assert "beyond" not in shown


def test_a_regression_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *alone(2.4, 2.5, 2.6)) == 1
    shown = capsys.readouterr().out
    assert "1.250" in shown
    assert shown.count("REGRESSION") == 1
    assert "1 missing, or worse by more than 10%" in shown


def test_the_tolerance(tmp_path: Path) -> None:
    assert run(tmp_path, *alone(2.4, 2.5, 2.6), options=("--tolerance", "0.3")) == 0


def test_one_fast_moment_hides_nothing(tmp_path: Path) -> None:
    """The ranges meet, the middle halves do not."""
    assert run(tmp_path, *alone(2.05, 2.5, 2.6)) == 1


@pytest.mark.parametrize("values", [(1.9, 2.0, 9.0), (1.8, 2.3, 2.7), (1.9, 1.98, 2.5, 2.5, 2.5)])
def test_what_the_spread_explains_is_no_regression(tmp_path: Path, values: tuple[float, ...]) -> None:
    """One slow moment; a median within the old middle half; the old median within the new one."""
    old = write(tmp_path / "old.json", *alone(1.9, 2.0, 2.6))
    new = write(tmp_path / "new.json", *alone(*values))
    assert main([str(old), str(new)]) == 0


def test_faster_is_no_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *alone(0.9, 1.0, 1.1)) == 0
    assert "beyond" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_machine_of_another_speed_neither_makes_nor_hides_a_regression(tmp_path: Path, factor: float) -> None:
    """Times of the case and its peer change alike; then the case alone becomes slower by a quarter."""

    def times(record: int, *values: float) -> list[tuple[tuple[str | int, ...], Any]]:
        return [(("records", record, name), value) for (*_, name), value in seconds(*values)]

    changed = [
        *times(0, *(factor * value for value in (1.9, 2.0, 2.1))),
        *times(1, *(factor * value for value in (3.9, 4.0, 4.1))),
    ]
    assert run(tmp_path, *changed) == 0
    assert run(tmp_path, *changed, *SLOWER_THAN_ITS_PEER) == 1


@pytest.mark.parametrize("figure", MORE_IS_BETTER)
def test_every_figure_has_its_better_direction(tmp_path: Path, figure: str) -> None:
    """A third more or less of it, in a case that has no peer."""
    old = write(tmp_path / "old.json", (("records", 2), {"case": "orthros 32", figure: 3.0}))
    for value, worse in ((4.0, not MORE_IS_BETTER[figure]), (2.0, MORE_IS_BETTER[figure]), (3.0, False)):
        new = write(tmp_path / "new.json", (("records", 2), {"case": "orthros 32", figure: value}))
        assert main([str(old), str(new)]) == int(worse)


def test_a_peer_is_shown_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is not ours to be regressed, nor are its figures over our arm."""
    assert run(tmp_path, (("records", 1, "speedup"), 0.1), (("records", 1, "seconds"), 40.0)) == 0
    assert "shown" in capsys.readouterr().out


def against_both(over_peer: float, speedup: float) -> tuple[tuple[str | int, ...], Any]:
    """A case that is set against a peer, which is missing where `over_peer` is 0, and against the transformer arm."""
    peer = {"over_peer": over_peer, "all_over_peer": [over_peer - 0.01, over_peer, over_peer + 0.01]}
    ratios = {"speedup": speedup, "share": speedup / 2, "processor_speedup": speedup}
    return ("records", 2), {"case": "orthros 32", "arm": "orthros", **(peer if over_peer else {}), **ratios}


def test_a_faster_transformer_is_no_regression_of_orthros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its speed-up and share drop while it is as fast as before beside the peer, which alone tells."""
    for before, after, regressions in (
        (against_both(0.5, 2.0), against_both(0.505, 1.5), 0),  # within the spread
        (against_both(0.5, 2.0), against_both(0.4, 1.5), 0),  # better
        (against_both(0.5, 2.0), against_both(0.53, 1.5), 2),  # worse: speed-up and share count
        (against_both(0.5, 2.0), against_both(0.7, 1.5), 3),
        (against_both(0, 2.0), against_both(0, 1.5), 2),  # no peer
    ):
        old, new = write(tmp_path / "old.json", before), write(tmp_path / "new.json", after)
        assert main([str(old), str(new)]) == int(regressions > 0)
        assert capsys.readouterr().out.count("REGRESSION") == regressions


def test_processor_time_is_judged_where_there_is_no_wall_time(tmp_path: Path) -> None:
    for more, code in (({"speedup": 2.0}, 0), ({}, 1)):
        files = [
            write(tmp_path / name, (("records", 2), {"case": "orthros 32", **more, "processor_speedup": value}))
            for name, value in (("old.json", 2.0), ("new.json", 1.0))
        ]
        assert main([str(file) for file in files]) == code


def test_more_memory_is_one(tmp_path: Path) -> None:
    assert run(tmp_path, (("records", 0, "peak_growth_mib"), 150.0)) == 1


def test_times_of_another_machine_are_shown_alone(tmp_path: Path) -> None:
    other = (("machine", "processor"), "Q")
    assert run(tmp_path, *alone(20.0, 20.0, 20.0), other, options=("--force",)) == 0
    assert run(tmp_path, *SLOWER_THAN_ITS_PEER, other, options=("--force",)) == 1


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("benchmark",), "decode", "differ in benchmark 'prefill' and 'decode'"),
        (("settings", "threads"), 1, "settings.threads 2 and 1"),
        (("machine", "new"), 1, "machine.new None and 1"),
        (("machine", "processor"), "Q", "machine.processor 'P' and 'Q'"),
    ],
)
def test_unlike_results_are_refused(tmp_path: Path, place: tuple[str, ...], value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(tmp_path, (place, value))
    assert run(tmp_path, (place, value), options=("--force",)) == 0


def test_a_setting_of_one_result_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of the two is from before the option, or from after it."""
    files = [write(tmp_path / "a.json"), write(tmp_path / "b.json", (("settings", "compile"), False))]
    for old, new, which in ((*files, "new"), (*reversed(files), "old")):
        assert main([str(old), str(new)]) == 0
        assert f"only in the {which} result: settings.compile False\n" in capsys.readouterr().out


def test_versions_and_added_cases_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old.json", (("records",), RESULT["records"][:2]))
    new = write(tmp_path / "new.json", (("machine", "commit"), "def"))
    assert main([str(old), str(new)]) == 0
    shown = capsys.readouterr().out
    assert "commit: abc and def" in shown
    assert "only in the new result: orthros 32" in shown


def test_what_is_missing_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A case, and a figure of a case: a regression may hide behind both."""
    for change, what in (
        ((("records", 1, "case"), "llama 65"), "llama 64"),
        ((("records", 0, "over_peer"), None), "orthros 64, over peer"),
    ):
        assert run(tmp_path, change) == 1
        assert f"MISSING from {tmp_path / 'new.json'}: {what}\n" in capsys.readouterr().out


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        write(folder / "a.json")
    write(new / "c.json")
    assert main([str(old), str(new)]) == 0
    write(old / "b.json")
    assert main([str(old), str(new)]) == 1
    assert f"MISSING from {new}: b.json" in capsys.readouterr().out
    write(new / "b.json", *alone(9.0))
    assert main([str(old), str(new)]) == 1
    write(new / "b.json")
    assert main([str(old), str(new)]) == 0


def test_bad_input(tmp_path: Path) -> None:
    file, folder = write(tmp_path / "a.json"), tmp_path / "folder"
    folder.mkdir()
    other = write(tmp_path / "b.json", (("records",), [{"case": "else", "seconds": 1.0}]))
    for arguments, message in (
        ([file, folder], "a file and a folder"),
        ([folder, tmp_path], "no result of the same name"),
        ([file, other], "no figure of the same case in common"),
        ([file, tmp_path / "absent.json"], "cannot be read as a benchmark's result"),
        ([file, file, "--tolerance", "-1"], "must be a finite number that is not negative"),
        ([file, file, "--tolerance", "nan"], "must be a finite number that is not negative"),
    ):
        with pytest.raises(InputError, match=message):
            main([str(argument) for argument in arguments])
