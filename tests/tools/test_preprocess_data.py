"""tools/preprocess_data.py as a user meets it: a corpus, one clear line for bad input, safe interruption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from orthros_train.data.corpus import open_corpus
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.tools.command import ROOT, run, run_here, start

TOOL = "preprocess_data"
HELP = """
import sys, runpy
sys.argv = ["preprocess_data.py", "--help"]
try:
    runpy.run_path("tools/preprocess_data.py", run_name="__main__")
except SystemExit as end:
    assert end.code == 0
slow_to_import = {"torch", "transformers", "datasets", "megatron", "pyarrow"}
assert not slow_to_import & set(sys.modules)
"""
Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Here]:
    previous = signal.getsignal(signal.SIGTERM)
    yield lambda *arguments: run_here(TOOL, *arguments, monkeypatch=monkeypatch, capsys=capsys)
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("one\n\ntwo\n\nthree")
    return tmp_path / "in.txt"


def test_from_files_to_a_corpus(text: Path, tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text(json.dumps({"body": "four"}) + "\n")
    prefix = tmp_path / "new" / "folder" / "c"
    code, stdout, stderr = run(
        TOOL,
        *("--input", text, tmp_path / "more.jsonl", "--text-key", "body", "--document-separator", "blank-line"),
        *("--tokenizer", "byte", "--output-prefix", prefix, "--workers", "2"),
    )
    assert code == 0
    assert all(line.startswith("preprocess: ") for line in stderr.splitlines())  # progress, on a slow machine
    assert stdout.startswith(f"wrote {prefix}: 4 documents (0 blank ones dropped), 19 tokens of 15 bytes of text")
    indexed = open_corpus(prefix, ByteTokenizer(), 259).indexed
    assert [bytes(indexed[i][:-1].astype("u1")).decode() for i in range(4)] == ["one", "two", "three", "four"]


def test_from_a_data_set(here: Here, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "test.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    arguments = ("--dataset", tmp_path / "d", "--dataset-split", "test", "--tokenizer", "byte", "--workers", "1")
    code, stdout, _ = here(*arguments, "--output-prefix", tmp_path / "c")
    assert (code, "2 documents" in stdout) == (0, True)


def test_help_is_fast_and_has_examples() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python tools/preprocess_data.py --input" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokenizer", "byte"], "one of the arguments --input --dataset is required"),
        (["--input", "{text}"], "the following arguments are required: --tokenizer"),
        (["--input", "no.txt", "--tokenizer", "byte"], "input no.txt does not exist"),
        (["--input", "{text}", "--tokenizer", "byte", "--workers", "0"], "--workers: must be at least 1"),
        (["--input", "{text}", "--tokenizer", "byte", "--workers", "two"], "--workers: 'two' is not an integer"),
        (["--input", "{text}", "--tokenizer", "byte", "--workers", "9" * 12], "--workers: must be at most 1024"),
        (["--input", "{text}", "--tokenizer", "byte", "--document-separator", ""], "--document-separator is empty"),
        (["--input", "{text}", "--tokenizer", "byte", "--document-separator", "a\nb"], "holds a line break"),
        (["--input", "{text}", "--tokenizer", "no/folder"], "tokenizer no/folder/tokenizer.json is missing"),
        (["--input", "{text}", "--tokenizer", "no.model"], "tokenizer no.model is missing; train one"),
        (["--input", "{text}", "--tokenizer", "x", "--tokenizer-type", "byte"], "the byte tokenizer has no file"),
        (["--input", "{text}", "--tokenizer", "byte", "--surprise"], "unrecognized arguments: --surprise"),
    ],
)
def test_bad_arguments_are_one_line(here: Here, arguments: list[str], message: str, text: Path, tmp_path: Path) -> None:
    filled = [argument.format(text=text) for argument in arguments]
    code, stdout, stderr = here(*filled, "--output-prefix", tmp_path / "out" / "c")
    assert code == 2
    assert stdout == ""
    assert stderr.startswith("error: ")
    assert message in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("prefix", ["new/", "there", "there/", "there/..", ".", "/"])
def test_a_prefix_that_names_a_folder_is_one_line(
    prefix: str, here: Here, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    code, _, stderr = here("--input", text, "--tokenizer", "byte", "--workers", "1", "--output-prefix", prefix)
    assert code == 2
    assert f"--output-prefix {prefix} names a folder" in stderr
    assert stderr.count("\n") == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["in.txt", "there"]


def test_bad_input_is_one_line_and_exit_code_2(text: Path, tmp_path: Path) -> None:
    text.write_bytes(b"\x00\x01\x02")
    code, stdout, stderr = run(TOOL, "--input", text, "--tokenizer", "byte", "--output-prefix", tmp_path / "out" / "c")
    assert (code, stdout) == (2, "")
    assert stderr == f"error: input {text} is a binary file (it holds NUL bytes); expected UTF-8 text\n"
    assert not (tmp_path / "out").exists()


def test_existing_output_needs_overwrite(here: Here, text: Path, tmp_path: Path) -> None:
    arguments = ("--input", text, "--tokenizer", "byte", "--workers", "1", "--output-prefix", tmp_path / "c")
    assert here(*arguments)[0] == 0
    code, _, stderr = here(*arguments)
    assert code == 2
    assert "c.manifest.json exists; pass --overwrite or choose another --output-prefix" in stderr
    assert here(*arguments, "--overwrite")[0] == 0


# ---- interruption


@pytest.fixture(scope="module")
def much_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 MB: work that outlasts an interrupt even where the test is kept waiting."""
    path = tmp_path_factory.mktemp("much") / "much.jsonl"
    path.write_text((json.dumps({"text": "abcdefghi " * 10000}) + "\n") * 2000)
    return path


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)


def test_kill_9_leaves_nothing_that_looks_complete_and_no_worker(much_text: Path, here: Here, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "c"
    arguments = ("--tokenizer", "byte", "--output-prefix", prefix, "--workers", "2")
    process = start(TOOL, "--input", much_text, *arguments)
    wait_for(prefix.with_name("c.partial") / "data.bin", process)  # it is writing
    workers = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait(timeout=20)
    survivors = psutil.wait_procs(workers, timeout=20)[1]
    for survivor in survivors:
        survivor.kill()
    assert len(workers) >= 2
    assert survivors == []
    process.communicate(timeout=20)
    assert [path.name for path in prefix.parent.iterdir()] == ["c.partial"]
    with pytest.raises(InputError, match="there is no corpus"):
        open_corpus(prefix, ByteTokenizer(), 259)
    (tmp_path / "little.jsonl").write_text('{"text": "x"}\n')
    assert here("--input", tmp_path / "little.jsonl", *arguments[:-1], "1")[0] == 0
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["c.bin", "c.idx", "c.manifest.json"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_one_line_and_leaves_nothing(number: signal.Signals, much_text: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "c"
    process = start(TOOL, "--input", much_text, "--tokenizer", "byte", "--output-prefix", prefix, "--workers", "2")
    wait_for(prefix.with_name("c.partial"), process)
    time.sleep(0.3)  # workers are starting
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # Ctrl-C reaches the workers, too
    else:
        process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (130, "", "interrupted: nothing was written\n")
    assert list(prefix.parent.iterdir()) == []
