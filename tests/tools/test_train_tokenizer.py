"""tools/train_tokenizer.py as a user meets it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from orthros_train.data.command_line import tokenizer_section
from orthros_train.data.tokenizers import load_tokenizer
from tests.tools.command import run, run_here

TOOL = "train_tokenizer"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("the walker was walking and talking to the talker\n" * 20)
    return tmp_path / "in.txt"


@pytest.fixture(autouse=True)
def _keep_interrupt_handler() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, previous)


def test_a_folder_that_the_preprocessor_takes(text: Path, tmp_path: Path) -> None:
    code, stdout, stderr = run(TOOL, "--input", text, "--vocab-size", "270", "--output", tmp_path / "t")
    assert (code, stdout) == (0, f"wrote {tmp_path / 't'}: 270 ids\n")
    assert stderr == "read 980 bytes of text; training\n"
    assert load_tokenizer(tokenizer_section(str(tmp_path / "t"), None)).vocab_size == 270


def test_sentencepiece_and_too_little_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--input", text, "--max-text-mib", "1")
    model = tmp_path / "t.model"
    arguments = (*common, "--algorithm", "sentencepiece-bpe", "--vocab-size", "370", "--output", model)
    assert run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)[:2] == (0, f"wrote {model}: 370 ids\n")
    assert load_tokenizer(tokenizer_section(str(model), None)).type == "sentencepiece"
    arguments = (*common, "--vocab-size", "5000", "--output", tmp_path / "b")
    code, stdout, _ = run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "ids (not 5000: the text holds no more pairs)" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "{text}", "--vocab-size", "300"], "required: --output"),
        (["--input", "no.txt", "--vocab-size", "300", "--output", "{out}"], "input no.txt does not exist"),
        (["--input", "{text}", "--vocab-size", "300", "--output", "{text}/t"], "cannot be written: "),
        (["--input", "{text}", "--vocab-size", "12", "--output", "{out}"], "--vocab-size 12 is too small"),
        (["--input", "{text}", "--vocab-size", "2147483647", "--output", "{out}"], "--vocab-size: must be at most"),
        (["--input", "{text}", "--vocab-size", "300", "--max-text-mib", "9" * 30, "--output", "{out}"], "at most"),
        (["--input", "{text}", "--vocab-size", "0", "--output", "{out}"], "--vocab-size: must be at least 1"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: list[str],
    message: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.format(text=text, out=tmp_path / "t") for argument in arguments]
    code, stdout, stderr = run_here(TOOL, *filled, monkeypatch=monkeypatch, capsys=capsys)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "t").exists()
