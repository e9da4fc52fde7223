"""tools/convert_llama.py as a user meets it."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthros_train.model import OrthrosConfig
from tests.conversion.sources import edit_json, save_source
from tests.tools.command import run, run_here

TOOL = "convert_llama"


@pytest.fixture(autouse=True)
def _keep_signal_handler() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_source(tmp_path / "source")


def test_there_and_back(source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    orthros, back = source.parent / "orthros", source.parent / "back"
    arguments = ("--input", source, "--output", orthros, "--base-window", "32", "--max-shard-size", "60kB")
    code, stdout, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stderr) == (0, "")
    assert stdout == f"wrote {orthros}: 27,488 parameters in 2 files\n"
    config = OrthrosConfig.from_pretrained(orthros)
    assert (config.base_window, config.base_sinks) == (32, 1)

    arguments = ("--to", "llama", "--input", orthros, "--output", back)
    code, stdout, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stdout, stderr) == (0, f"wrote {back}: 27,168 parameters in 1 file\n", "")
    before, after = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_options_reach_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_source(tmp_path / "source", "mistral", sliding_window=24)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    arguments = ["--input", source, "--output", tmp_path / "orthros", "--base-window", "8", "--base-sinks", "3"]
    for option, message in (("--widen-output-window", "pass --widen-output-window"), ("--allow-pickle", "--allow-pi")):
        code, _, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
        assert (code, message in stderr) == (2, True)
        arguments.append(option)
    code, _, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert stderr.startswith(
        "note: the source attends in a sliding window, so it is equalled only on texts of at most 24"
    )
    assert OrthrosConfig.from_pretrained(tmp_path / "orthros").base_sinks == 3

    arguments = ["--input", source, "--output", tmp_path / "arm", "--architecture", "transformer", *arguments[8:]]
    assert run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)[0] == 0
    arm = OrthrosConfig.from_pretrained(tmp_path / "arm")
    assert (arm.architecture, arm.base_window, arm.base_sinks) == ("transformer", None, 0)


def test_dropped_affines_are_told(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    orthros, back = source.parent / "orthros", source.parent / "back"
    run_here(TOOL, "--input", source, "--output", orthros, "--base-window", "8", monkeypatch=monkeypatch, capsys=capsys)
    tensors = load_file(orthros / "model.safetensors")
    tensors["model.layers.0.self_attn.output_query.gain"][0] = 1.5
    save_file(tensors, orthros / "model.safetensors", metadata={"format": "pt"})
    arguments = ["--to", "llama", "--input", orthros, "--output", back]
    code, _, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "pass --drop-affines" in stderr) == (2, True)
    code, stdout, stderr = run_here(TOOL, *arguments, "--drop-affines", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stdout) == (0, f"wrote {back}: 27,168 parameters in 1 file\n")
    assert stderr.startswith("warning: dropped query affines that were up to 0.5 away from the identity")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{source}", "--output", "{out}"], "needs a window for its base stream; pass --base-window W"),
        (["--input", "{source}", "--base-window", "8"], "required: --output"),
        (["--input", "nowhere/7b", "--output", "{out}", "--base-window", "8"], "nowhere/7b is not a folder; download"),
        (["--input", "{source}", "--output", "{source}", "--base-window", "8"], "exists and is not empty"),
        (["--input", "{source}", "--output", "{out}", "--base-window", "0"], "--base-window: must be at least 1"),
        (["--input", "{source}", "--output", "{out}", "--base-window", "8", "--base-sinks", "-1"], "at least 0"),
        (["--input", "{source}", "--output", "{out}", "--base-window", "8", "--drop-affines"], "with --to orthros"),
        (["--input", "{source}", "--output", "{out}", "--to", "llama", "--base-window", "8"], "with --to llama"),
        (["--input", "{source}", "--output", "{out}", "--to", "llama", "--allow-pickle"], "--allow-pickle has no mean"),
        (["--input", "{source}", "--output", "{out}", "--to", "llama"], "only an Orthros model has a way back"),
        (["--input", "{source}", "--output", "{out}", "--base-window", "8", "--max-shard-size", "big"], "shard size"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.format(source=source, out=source.parent / "out") for argument in arguments]
    code, stdout, stderr = run_here(TOOL, *filled, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert len(stderr.splitlines()) == 1
    assert stderr.startswith("error: ")
    assert [path.name for path in source.parent.iterdir()] == ["source"]


def test_a_process_of_its_own_reports_bad_input(source: Path) -> None:
    edit_json(source / "config.json", num_local_experts=8)
    arguments = ("--input", source, "--output", source.parent / "out", "--base-window", "8")
    code, stdout, stderr = run(TOOL, *arguments)
    assert (code, stdout) == (2, "")
    assert stderr == (
        f"error: {source}/config.json: the key 'num_local_experts' (value 8) is not known for model_type 'llama'; "
        "if it does not change what the model computes, remove it from a copy of the file\n"
    )


def test_an_interrupted_conversion_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from orthros_train.conversion import shard_writer  # noqa: PLC0415

    def interrupt(*arguments: object, **options: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(shard_writer, "save_file", interrupt)
    arguments = ("--input", source, "--output", source.parent / "out", "--base-window", "8")
    code, stdout, stderr = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stdout, stderr) == (130, "", "interrupted: nothing was written\n")
    assert [path.name for path in source.parent.iterdir()] == ["source"]
    assert json.loads((source / "config.json").read_text())["model_type"] == "llama"
