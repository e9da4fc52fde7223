"""tools/export_hf.py and tools/inspect_checkpoint.py as a user meets them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.command import run_here
from tests.training.small_runs import run as train
from tests.training.small_runs import small_config, write_corpus

Tool = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint each."""
    folder = tmp_path_factory.mktemp("run")
    corpus = write_corpus(folder, ["one two three four five six seven " * 4] * 40)
    config = small_config(folder / "run", corpus, train__steps=2, checkpoint__interval_steps=1)
    assert train(config) == 0
    return folder / "run"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return lambda *arguments: run_here(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def damage(checkpoint: Path) -> None:
    file = next(checkpoint.glob("state/*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def copy_of(run_folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(run_folder, target))


def test_export(finished: Path, tmp_path: Path, tool: Tool) -> None:
    """The newest checkpoint of the run is meant."""
    code, stdout, stderr = tool("export_hf", "--checkpoint", finished, "--output", tmp_path / "model")
    assert (code, stderr) == (0, "")
    assert stdout == f"wrote {tmp_path / 'model'}\n"
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "orthros"


def test_export_takes_the_dtype(finished: Path, tmp_path: Path, tool: Tool) -> None:
    checkpoint = finished / "checkpoints" / "step_00000001"
    arguments = ("--checkpoint", checkpoint, "--output", tmp_path / "model", "--dtype", "bf16")
    assert tool("export_hf", *arguments)[0] == 0
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_of_a_damaged_checkpoint(finished: Path, tmp_path: Path, tool: Tool) -> None:
    folder = copy_of(finished, tmp_path / "run")
    damage(folder / "checkpoints" / "step_00000002")
    code, _, stderr = tool("export_hf", "--checkpoint", folder, "--output", tmp_path / "model")
    assert code == 2
    assert stderr.startswith("error: checkpoint ")
    assert "is corrupt" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--checkpoint", "nowhere", "--output", "model"], "error: no checkpoint in nowhere"),
        (["--checkpoint", "x", "--output", "y", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["--checkpoint", "x"], "--output"),
    ],
)
def test_export_bad_input(tool: Tool, arguments: list[str], message: str) -> None:
    code, stdout, stderr = tool("export_hf", *arguments)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert len(stderr.splitlines()) == 1


def test_export_refuses_a_full_folder(finished: Path, tmp_path: Path, tool: Tool) -> None:
    (tmp_path / "keep").write_text("mine")
    code, _, stderr = tool("export_hf", "--checkpoint", finished, "--output", tmp_path)
    assert code == 2
    assert "exists and is not empty" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["keep"]


def test_inspect(finished: Path, tool: Tool) -> None:
    code, stdout, _ = tool("inspect_checkpoint", finished)
    assert code == 0
    assert "whole: every size and SHA-256 agrees" in stdout
    assert "step         2 (2 updates, 0 skipped)" in stdout
    assert "next sample  16" in stdout
    assert re.search(r"^tokenizer    [0-9a-f]{64}  \(SHA-256 of the tokenizer's definition\)$", stdout, re.MULTILINE)
    assert re.search(
        r"^data         [0-9a-f]{64}  \(SHA-256 of what decides the tokens of every ", stdout, re.MULTILINE
    )
    assert "layout       1 rank, ZeRO-1, " in stdout
    assert "hf/tokenizer.json" in stdout


def test_inspect_finds_damage(finished: Path, tmp_path: Path, tool: Tool) -> None:
    folder = copy_of(finished, tmp_path / "run") / "checkpoints" / "step_00000002"
    damage(folder)
    code, stdout, _ = tool("inspect_checkpoint", folder)
    assert code == 1
    assert "damaged: state/rank_00000.safetensors is corrupt" in stdout
    code, stdout, _ = tool("inspect_checkpoint", folder, "--no-verify")
    assert code == 0
    assert "not verified" in stdout
    (folder / "manifest.json").write_text("{")
    code, stdout, _ = tool("inspect_checkpoint", folder)
    assert code == 1
    assert "manifest.json is unreadable" in stdout


def test_inspect_without_a_checkpoint(tmp_path: Path, tool: Tool) -> None:
    code, _, stderr = tool("inspect_checkpoint", tmp_path)
    assert code == 2
    assert "no checkpoint in" in stderr
