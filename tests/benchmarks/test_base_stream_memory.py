"""The benchmark measures what it says, and its judgement fails on quadratic growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import base_stream_memory
from benchmarks.base_stream_memory import build_parser, judge, measure
from orthros_train.errors import InputError
from orthros_train.model import attention_kernels


def record(length: int, **changes: Any) -> dict[str, Any]:
    linear = {
        "case": f"T={length}",
        "length": length,
        "seconds": length / 1e5,
        "peak_growth_mib": length / 1e3,
        "largest_tensor_elements": 256 * length,
        "square_elements": length**2,
    }
    return {**linear, **changes}


def test_linear_growth_is_no_fault() -> None:
    assert judge([record(8192), record(16384), record(32768)], tolerance=1.25) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"largest_tensor_elements": 32768**2}, "T² or more"),
        ({"peak_growth_mib": 1024.0}, "T² bytes or more"),
        ({"seconds": 8192 / 1e5 * 16}, "time grew 16.00×"),
        ({"peak_growth_mib": 8.192 * 6}, "memory grew 6.00×"),
    ],
)
def test_quadratic_growth_is_a_fault(changes: dict[str, Any], message: str) -> None:
    faults = judge([record(8192), record(32768, **changes)], tolerance=1.25)
    assert any(message in fault for fault in faults)


def test_the_largest_tensor_is_seen_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    options = build_parser().parse_args(
        ["--output", "x", "--window", "16", "--heads", "1", "--head-dim", "8", "--repeats", "1"]
    )
    found = measure(512, options)
    assert found["largest_tensor_elements"] < found["square_elements"] == 512**2
    monkeypatch.setitem(attention_kernels._KERNELS, "sdpa", attention_kernels.eager)
    assert measure(512, options)["largest_tensor_elements"] >= 512**2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(command: list[str], what: str, **changes: Any) -> dict[str, Any]:
        assert command[-2] == "--one-length"
        assert what == f"T={command[-1]}"
        return record(int(command[-1]), **changes)

    monkeypatch.setattr(base_stream_memory, "in_own_process", measured)
    output = tmp_path / "new" / "result.json"
    assert base_stream_memory.main(["--output", str(output), "--lengths", "32768,8192"]) == 0
    content = json.loads(output.read_text())
    assert content["passed"]
    assert [entry["length"] for entry in content["records"]] == [8192, 32768]
    assert (content["settings"]["threads"], content["settings"]["window"]) == (1, 256)
    assert "largest tensor" in capsys.readouterr().out
    monkeypatch.setattr(
        base_stream_memory,
        "in_own_process",
        lambda command, what: measured(command, what, seconds=int(command[-1]) ** 2),
    )
    assert base_stream_memory.main(["--output", str(output)]) == 1
    assert "FAIL: time grew 16.00×" in capsys.readouterr().out


def test_bad_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 1"):
        base_stream_memory.main(["--output", str(tmp_path / "x.json"), "--window", "0"])


@pytest.mark.evidence
def test_16384_tokens_without_a_square_tensor(tmp_path: Path) -> None:
    assert base_stream_memory.main(["--output", str(tmp_path / "x.json")]) == 0
