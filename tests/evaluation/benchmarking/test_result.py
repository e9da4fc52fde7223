"""Results hold what a comparison needs; figures are derived as their names say."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from evaluation.benchmarking.result import Result, counted_calls, read_results, set_against, timed
from orthros_train.errors import InputError


def options(output: Path, **more: object) -> argparse.Namespace:
    return argparse.Namespace(output=output, repeats=3, device="cpu", **more)


def test_figures() -> None:
    slow, fast = timed("slow", [6.0, 4.0, 8.0], 30), timed("fast", [2.0, 1.0, 3.0], 20, arm="orthros")
    assert (slow["seconds"], slow["spread"], slow["flops_per_second"]) == (6.0, 4 / 6, 5.0)
    assert fast["arm"] == "orthros"
    set_against({"transformer": slow, "orthros": fast})
    assert (slow["speedup"], slow["flop_ratio"], slow["share"]) == (1, 1, 1)
    assert (fast["speedup"], fast["flop_ratio"], fast["share"]) == (3.0, 1.5, 2.0)
    assert (fast["all_speedup"], fast["all_share"]) == ([3.0, 4.0, 8 / 3], [2.0, 8 / 3, 16 / 9])  # round by round
    assert "over_peer" not in fast


def test_figures_beside_a_peer() -> None:
    ours, peer = timed("ours", [2.0, 1.0, 3.0], 20), timed("peer", [4.0, 4.0, 4.0], 20)
    set_against({"orthros": ours, "llama": peer})
    assert (ours["over_peer"], ours["all_over_peer"], peer["over_peer"]) == (0.5, [0.5, 0.25, 0.75], 1)
    assert "speedup" not in ours


def test_what_is_written_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "speed.json"
    result = Result("speed", options(output, length=8, folder=Path("x"), verbose=True), ["verbose"], shape={"D": 4})
    result.write([timed("a", [1.0, 2.0, 3.0]), {**timed("b", [1.0]), "peak_growth_mib": 7.5}], ["a note"], passed=True)
    content = read_results(output)
    assert content["benchmark"] == "speed"
    assert content["settings"] == {"length": 8, "folder": "x", "device": "cpu", "shape": {"D": 4}}
    assert content["machine"]["device"] == "cpu"
    assert content["machine"]["cores"] >= 1
    assert set(content["load_average"]) == {"before", "after"}
    assert [record["all_seconds"] for record in content["records"]] == [[1.0, 2.0, 3.0], [1.0]]
    assert content["passed"] is True
    shown = capsys.readouterr().out
    assert "median s" in shown
    assert "7.5" in shown
    assert "a note" in shown
    assert "FLOPs" not in shown  # no record has any


@pytest.mark.parametrize("content", ["[]", "{", '{"benchmark": "x", "settings": {}, "machine": {}}'])
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"x\.json"):
        read_results(path)
    with pytest.raises(InputError, match="absent"):
        read_results(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("a", "record 2 is no object"),
        ({"seconds": 1.0}, "record 2 has no name"),
        ({"case": ["a"]}, "record 2 has no name"),
        ({"case": "a", "seconds": "fast"}, r"record 2 \(a\) has seconds 'fast', which is no finite number"),
        ({"case": "a", "share": True}, "has share True"),
        ({"case": "a", "over_peer": float("nan")}, "has over_peer nan"),
        ({"case": "a", "seconds": 1.0, "all_seconds": [None, 1]}, "has all_seconds .*, which is no list of finite"),
        ({"case": "a", "seconds": 1.0, "all_seconds": 1.0}, "has all_seconds 1.0"),
    ],
)
def test_a_damaged_record_is_refused(tmp_path: Path, record: Any, message: str) -> None:
    path, good = tmp_path / "x.json", {"case": "good", "seconds": 1, "speedup": None, "all_seconds": None}
    content = {"benchmark": "x", "settings": {}, "machine": {}}
    path.write_text(json.dumps({**content, "records": [good]}))
    assert read_results(path)["records"] == [good]
    path.write_text(json.dumps({**content, "records": [good, record]}))
    with pytest.raises(InputError, match=message):
        read_results(path)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        Result("speed", options(tmp_path))


def test_progress_counts_the_calls(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orthros_train.data.progress.PLAIN_INTERVAL_SECONDS", 0.0)
    with counted_calls("speed", 4) as on_call:
        on_call("a")
        on_call("b")
    assert capsys.readouterr().err.splitlines() == ["speed: 0%, a", "speed: 25%, b"]


def test_json_is_plain(tmp_path: Path) -> None:
    output = tmp_path / "x.json"
    Result("speed", options(output)).write([timed("a", [1.0])])
    assert json.loads(output.read_text())["records"][0]["case"] == "a"
