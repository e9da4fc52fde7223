"""The text is the same each time, the ways must agree, and their figures are medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import preprocessing_speed
from benchmarks.preprocessing_speed import Run, Way, first_mebibyte, measure, write_text
from orthros_train.errors import InputError

TOKENS_OF_LINES = "import sys; print({each} * sum(len(open(file).readlines()) for file in sys.argv[1:]))"


def counting(each: int, name: str = "loop") -> Way:
    program = [sys.executable, "-c", TOKENS_OF_LINES.format(each=each)]
    return Way(name, 2, lambda text: [*program, *map(str, text)], int)


@pytest.fixture
def texts(tmp_path: Path) -> tuple[list[Path], list[Path]]:
    start, one, other = tmp_path / "start", tmp_path / "one", tmp_path / "other"
    start.write_text("a\n" * 10)
    one.write_text("a\n" * 40)
    other.write_text("a\n" * 20)
    return [start], [one, other]


def test_the_text_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = (b"".join(file.read_bytes() for file in write_text(tmp_path, 1, files=2)) for _ in range(2))
    assert one == other
    assert 2**20 <= len(one) < 1.1 * 2**20
    assert (tmp_path / "text-0.jsonl").read_bytes() != (tmp_path / "text-1.jsonl").read_bytes()
    assert all(len(json.loads(line)["text"].split()) >= 50 for line in one.splitlines())


def test_the_first_mebibyte_ends_with_a_line(tmp_path: Path) -> None:
    (text,) = write_text(tmp_path, 2, files=1)
    start = first_mebibyte(text).read_bytes()
    assert text.read_bytes().startswith(start)
    assert start.endswith(b"\n")
    assert 0.99 * 2**20 < len(start) <= 2**20


def test_rates_leave_the_start_out(texts: tuple[list[Path], list[Path]], monkeypatch: pytest.MonkeyPatch) -> None:
    took = {1: Run(100, 3.0, 2.0), 2: Run(600, 5.0, 12.0)}
    monkeypatch.setattr(preprocessing_speed, "encode", lambda way, text: took[len(text)])
    (record,) = measure([counting(10)], *texts, repeats=3)
    assert (record["case"], record["tokens"], record["seconds"]) == ("loop, 2 processes", 600, 5.0)
    assert record["start_up_processor_seconds"] == 2.0
    assert (record["tokens_per_second"], record["tokens_per_processor_second"]) == (250.0, 50.0)
    assert record["processor_speedup"] == 1.0


def test_a_way_is_run_and_timed(texts: tuple[list[Path], list[Path]]) -> None:
    run = preprocessing_speed.encode(counting(10), texts[1])
    assert run.tokens == 600
    assert run.processor_seconds > 0
    assert 0 < run.seconds < 60


def test_ways_that_disagree_are_refused(texts: tuple[list[Path], list[Path]]) -> None:
    with pytest.raises(InputError, match="do not agree on the number of tokens"):
        measure([counting(1), counting(2, "other")], *texts, repeats=1)


@pytest.mark.evidence
def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    assert preprocessing_speed.main(["--output", str(output), "--megabytes", "2", "--repeats", "1"]) == 0
    records = json.loads(output.read_text())["records"]
    assert len({record["tokens"] for record in records}) == 1
    assert len(records) == 3
