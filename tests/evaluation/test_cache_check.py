"""The cache check passes on a right cache and fails on every way of breaking one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation import cache_check
from evaluation.cache_check import check_cache, default_chunk_sizes, default_lengths
from orthros_train.errors import InputError
from orthros_train.model import KVCache
from orthros_train.model.visibility import Visibility
from tests.model.tiny import tiny_model

Break = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"base_sinks": 2},
        {"base_window": 1},
        {"architecture": "transformer", "query_affine": "none"},
        {"architecture": "transformer", "query_affine": "none", "base_window": None},
    ],
)
def test_a_right_cache_passes(changes: dict[str, Any]) -> None:
    report = check_cache(tiny_model(torch.float32, **changes))
    assert report.passed
    assert report.max_difference("float64") < 1e-12
    assert {case.dtype for case in report.cases} == {"float64", "float32"}


def test_bfloat16_has_a_bound_of_its_own() -> None:
    report = check_cache(tiny_model(torch.bfloat16), chunk_sizes=[None])
    assert report.passed
    assert 0 < report.max_difference("bfloat16") < 0.05 * max(case.max_logit for case in report.cases)


def test_every_length_is_checked_alone_and_all_together_under_every_chunk_size() -> None:
    report = check_cache(tiny_model(), lengths=[1, 4, 9], chunk_sizes=[None, 2], decode_steps=3)
    assert [(case.lengths, case.chunk_size) for case in report.cases] == [
        ((1,), None),
        ((4,), None),
        ((9,), None),
        ((1, 4, 9), None),
        ((1, 4, 9), 2),
    ]


def test_growth_is_one_entry_a_step_in_every_layer() -> None:
    report = check_cache(tiny_model(), lengths=[2, 7], decode_steps=6)
    assert [growth.prompt_length for growth in report.growth] == [2, 7]
    assert report.growth[0].entries == (tuple(range(2, 9)),) * 3
    assert report.growth[1].entries == (tuple(range(7, 14)),) * 3


def test_defaults_straddle_the_window() -> None:
    assert default_lengths(5, 100) == [1, 4, 5, 6, 11, 17]
    assert default_lengths(1, 100) == [1, 2, 3, 5]
    assert default_lengths(5, 8) == [1, 4, 5, 6]
    assert default_lengths(None, 100) == default_lengths(cache_check.DEFAULT_WINDOW, 100)
    assert default_chunk_sizes(8) == [None, 3, 8, 9]


def _drop_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step sees its window alone, as with a sliding-window cache."""
    original = KVCache.update

    def update(self: KVCache, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any) -> Any:
        keys, values = original(self, keys, values, layer, *rest)
        forgotten = max(keys.shape[2] - 5, 0) if self.get_seq_length() else 0
        return keys.index_fill(2, torch.arange(forgotten), 0), values.index_fill(2, torch.arange(forgotten), 0)

    monkeypatch.setattr(KVCache, "update", update)


def _window_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step's base token sees one key more than in the full forward."""
    original = Visibility.sees

    def sees(self: Visibility, queries: slice, keys: torch.Tensor) -> torch.Tensor:
        wider = self.positions.shape[1] == 1 and self.window is not None
        changed = Visibility(self.positions, self.first, self.window + 1, self.sinks) if wider else self  # type: ignore[operator]
        return original(changed, queries, keys)

    monkeypatch.setattr(Visibility, "sees", sees)


def _write_in_the_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoding step also touches the first entry."""
    original = KVCache.commit

    def commit(self: KVCache) -> None:
        original(self)
        if self.get_seq_length() > 12:
            self.keys(0)[:, :, 0] += 1e-3

    monkeypatch.setattr(KVCache, "commit", commit)


def _nan_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCache.commit

    def commit(self: KVCache) -> None:
        original(self)
        if self.get_seq_length() == 13:
            self.values(1)[:] = float("nan")

    monkeypatch.setattr(KVCache, "commit", commit)


@pytest.mark.parametrize(
    "break_cache", [_drop_history, _window_off_by_one, _write_in_the_wrong_place, _nan_in_one_step]
)
def test_a_broken_cache_fails(break_cache: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(attention_kernel="eager")
    break_cache(monkeypatch)
    report = check_cache(model, lengths=[11], chunk_sizes=[None], decode_steps=4)
    assert not report.passed


def test_changed_history_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _write_in_the_wrong_place(monkeypatch)
    report = check_cache(tiny_model(), lengths=[11], chunk_sizes=[None], decode_steps=4)
    assert "layer 0 changed earlier entries at step 2" in report.cases[0].cache_errors


def test_a_lost_entry_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = KVCache.keys
    monkeypatch.setattr(KVCache, "keys", lambda self, layer: original(self, layer)[:, :, : 12 if layer == 2 else None])
    report = check_cache(tiny_model(), lengths=[11], chunk_sizes=[None], decode_steps=3)
    assert not report.passed
    assert report.cases[0].cache_errors[0] == "layer 2 holds 12 keys and 13 values after step 2, expected 13"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": []}, "prompt lengths"),
        ({"lengths": [0]}, "prompt lengths"),
        ({"chunk_sizes": [-1]}, "chunk sizes"),
        ({"decode_steps": 0}, "decoding step"),
        ({"lengths": [510]}, "exceed the model's 512 positions"),
        ({"dtypes": ["float16"]}, "no bound is known for dtype float16"),
    ],
)
def test_unusable_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_cache(tiny_model(), **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_model(torch.float32).save_pretrained(path)
    return path


def test_the_command_writes_json_and_a_table(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "check.json"
    assert (
        cache_check.main(["--model", str(folder), "--output", str(output), "--lengths", "1,6", "--chunk-sizes", "0,2"])
        == 0
    )
    content = json.loads(output.read_text())
    assert content["passed"]
    assert content["max_difference"]["float32"] == max(
        case["max_difference"] for case in content["cases"] if case["dtype"] == "float32"
    )
    assert content["growth"][1] == {"prompt_length": 6, "entries": [list(range(6, 14))] * 3}
    assert [case["chunk_size"] for case in content["cases"]][:4] == [None, None, None, 2]
    printed = capsys.readouterr().out
    assert "largest |Δ|" in printed
    assert len(re.findall(r"\bpass\b", printed)) == len(content["cases"])
    assert "6 after the prefill, 13 after 7 steps" in printed


def test_the_command_exits_1_on_a_broken_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _drop_history(monkeypatch)
    output = tmp_path / "check.json"
    assert cache_check.main(["--model", str(folder), "--output", str(output)]) == 1
    assert not json.loads(output.read_text())["passed"]
    assert "FAIL" in capsys.readouterr().out


def test_a_window_of_ones_own(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "check.json"
    assert cache_check.main(["--model", str(folder), "--output", str(output), "--window", "3"]) == 0
    content = json.loads(output.read_text())
    assert content["base_window"] == 3
    assert [case["lengths"] for case in content["cases"]][:6] == [[1], [2], [3], [4], [7], [11]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "{tmp}/none"], "does not exist"),
        (["--model", "{tmp}"], "holds no config.json"),
        (["--model", "{model}", "--window", "0"], "argument --window: must be at least 1"),
        (["--model", "{model}", "--seed", "-1"], "argument --seed: must be at least 0"),
        (["--model", "{model}", "--seed", "1e3"], "argument --seed: '1e3' is not an integer"),
        (["--model", "{model}", "--seed", str(2**63)], "argument --seed: must be at most 9223372036854775807"),
        (["--model", "{model}", "--decode-steps", "0"], "argument --decode-steps: must be at least 1"),
        (["--model", "{model}", "--lengths", "1,x"], "not a list of whole numbers"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, folder: Path, tmp_path: Path) -> None:
    filled = [argument.format(tmp=tmp_path, model=folder) for argument in arguments]
    with pytest.raises(InputError, match=message):
        cache_check.main([*filled, "--output", str(tmp_path / "check.json")])
    assert not (tmp_path / "check.json").exists()


def test_an_output_that_is_a_folder_is_refused_before_any_work(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder"):
        cache_check.main(["--model", str(folder), "--output", str(tmp_path)])
