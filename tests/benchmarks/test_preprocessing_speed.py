"""The text is the same each time, the ways must agree, and their figures are medians."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import preprocessing_speed
from benchmarks.preprocessing_speed import Way, measure, write_text
from orthros_train.errors import InputError


def printing(tokens: int, name: str = "loop") -> Way:
    return Way(name, 2, [sys.executable, "-c", f"print({tokens})"], int)


def test_the_text_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = write_text(tmp_path / "a", 1).read_bytes(), write_text(tmp_path / "b", 1).read_bytes()
    assert one == other
    assert 2**20 <= len(one) < 1.1 * 2**20
    assert all(len(json.loads(line)["text"].split()) >= 50 for line in one.splitlines())


def test_figures() -> None:
    (record,) = measure([printing(600)], repeats=3)
    assert (record["case"], record["tokens"]) == ("loop, 2 processes", 600)
    assert len(record["all_seconds"]) == len(record["all_processor_seconds"]) == 3
    assert record["tokens_per_second"] == pytest.approx(600 / sorted(record["all_seconds"])[1])
    assert record["tokens_per_processor_second"] == pytest.approx(600 / sorted(record["all_processor_seconds"])[1])


def test_ways_that_disagree_are_refused() -> None:
    with pytest.raises(InputError, match="do not agree on the number of tokens"):
        measure([printing(1), printing(2, "other")], repeats=1)


@pytest.mark.evidence
def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "speed.json"
    assert preprocessing_speed.main(["--output", str(output), "--megabytes", "2", "--repeats", "1"]) == 0
    records = json.loads(output.read_text())["records"]
    assert len({record["tokens"] for record in records}) == 1
    assert len(records) == 3
