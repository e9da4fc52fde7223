"""The prefill benchmark on a small model: its cases, its FLOPs, what it derives, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prefill
from evaluation.benchmarking.llama import llama_prefill_flops
from evaluation.benchmarking.models import arm_configs
from orthros_train.errors import InputError
from orthros_train.model.flops import prefill_flops
from tests.benchmarks.shapes import QUICK


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    output = tmp_path / "new" / "prefill.json"
    assert prefill.main(["--output", str(output), *QUICK, "--repeats", "2", *arguments]) == 0
    return json.loads(output.read_text())


def test_every_arm_at_every_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, "--lengths", "40,16", "--profile", "--chunk-size", "12")
    records = {record["case"]: record for record in result["records"]}
    assert list(records) == [f"{arm} {n}" for n in (16, 40) for arm in ("transformer", "orthros", "llama")]
    configs = arm_configs(prefill.build_parser().parse_args(["--output", "x", *QUICK]), 40)
    for length in (16, 40):
        base = records[f"transformer {length}"]
        assert base["flops"] == prefill_flops(configs["transformer"], length).total
        orthros, llama = records[f"orthros {length}"], records[f"llama {length}"]
        assert orthros["flops"] == prefill_flops(configs["orthros"], length).total
        assert llama["flops"] == llama_prefill_flops(configs["transformer"], length).total > base["flops"]
        for record in (base, orthros, llama):
            assert len(record["all_seconds"]) == 2
            assert record["speedup"] == pytest.approx(base["seconds"] / record["seconds"])
            assert record["flop_ratio"] == pytest.approx(base["flops"] / record["flops"])
            assert record["over_peer"] == pytest.approx(record["seconds"] / llama["seconds"])
            assert record["share"] == pytest.approx(record["speedup"] / record["flop_ratio"])
    assert "growth" not in records["orthros 16"]
    ratio = records["orthros 40"]["seconds"] / records["orthros 16"]["seconds"]
    assert records["orthros 40"]["growth"] == pytest.approx(ratio)
    assert {arm: len(found) for arm, found in result["kernels"].items()} == dict.fromkeys(configs | {"llama": 0}, 10)
    shown = capsys.readouterr().out
    assert "FLOP limit" in shown
    assert "llama: largest kernels" in shown


def test_peak_memory_beside_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def child(command: list[str], what: str) -> float:
        assert Path(command[0]).name == "prefill.py"
        assert command[-2] == "--peak-of"
        asked.append(command[-1])
        return 0.5

    monkeypatch.setattr("evaluation.benchmarking.peak_memory.in_own_process", child)
    (record,) = run(tmp_path, "--lengths", "1024", "--arms", "orthros", "--peak-memory")["records"]
    assert asked == ["orthros:1024"]
    assert record["peak_growth_mib"] == 0.5
    cache = 3 * 2 * 2 * 8 * 1024 * 4  # layers, K and V, G, d, T, bytes
    assert record["peak_over_cache"] == 0.5 * 2**20 / cache
    assert "speedup" not in record  # no transformer to be set against


def test_times_stay_where_a_peak_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def child(command: list[str], what: str) -> float:
        if command[-1] == "orthros:16":
            raise InputError(f"{what} cannot be measured: exit code -9, killed")
        return 0.5

    monkeypatch.setattr("evaluation.benchmarking.peak_memory.in_own_process", child)
    output = tmp_path / "prefill.json"
    given = ["--lengths", "16", "--arms", "transformer,orthros", "--repeats", "1", "--peak-memory"]
    assert prefill.main(["--output", str(output), *QUICK, *given]) == 1
    transformer, orthros = json.loads(output.read_text())["records"]
    assert transformer["peak_growth_mib"] == 0.5
    assert transformer["peak_over_cache"] > 0
    assert "peak_memory_problem" not in transformer
    problem = "the peak memory of orthros 16 cannot be measured: exit code -9, killed"
    assert orthros["seconds"] > 0
    assert (orthros["peak_growth_mib"], orthros["peak_over_cache"]) == (None, None)
    assert orthros["peak_memory_problem"] == problem
    assert f"LEFT OUT: {problem}\n" in capsys.readouterr().out


def test_the_peak_of_one_prefill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--output", str(tmp_path / "x.json"), *QUICK]
    assert prefill.main([*common, "--peak-of", "orthros:16384"]) == 0
    cache_mib = 3 * 2 * 2 * 8 * 16384 * 4 / 2**20
    assert cache_mib < float(capsys.readouterr().out) < 100 * cache_mib
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "0"), "--lengths must be at least 1, got 0"),
        (("--lengths", "a"), "not a list of whole numbers"),
        (("--peak-of", "orthros"), "not an arm and a length such as orthros:4096"),
        (("--repeats", "0"), "must be at least 1"),
        (("--arms", "orthros", "--peak-of", "llama:1024"), "llama:1024 is none of what --arms and --lengths name"),
        (("--peak-of", "llama:17"), "llama:17 is none of what --arms and --lengths name"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prefill.main(["--output", str(tmp_path / "x.json"), *arguments])
