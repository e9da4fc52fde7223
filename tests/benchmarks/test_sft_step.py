"""The benchmark's row and counts, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.sft_step import build_parser, main, row
from orthros_train.errors import InputError

SMALL = ("--length", "64", "--width", "64", "--layers", "2", "--window", "8", "--repeats", "1", "--conversations", "2")


def test_the_row() -> None:
    """Answers are the given share of the tokens, at the end of each conversation."""
    options = build_parser().parse_args(["--output", "x", *SMALL, "--answer-share", "0.25"])
    labels = (row(options)["shift_labels"][0] != -100).tolist()
    assert labels == ([False] * 24 + [True] * 8) * 2


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "result.json"
    assert main(["--output", str(output), *SMALL]) == 0
    records = {record["case"]: record for record in json.loads(output.read_text())["records"]}
    assert list(records) == ["orthros sft", "orthros pt", "transformer sft", "transformer pt"]
    assert records["orthros pt"]["flop_ratio"] == records["orthros pt"]["time_ratio"] == 1
    flops = {case: record["flops"] for case, record in records.items()}
    assert flops["transformer sft"] < flops["orthros sft"] < flops["orthros pt"]
    assert flops["transformer pt"] < flops["orthros pt"]
    assert "orthros sft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--answer-share", "0"), "give a share above 0 and at most 1"),
        (("--width", "100"), "--width must be a multiple of 64"),
        (("--length", "3", "--conversations", "4"), "--conversations at most --length"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        main(["--output", str(tmp_path / "x.json"), *arguments])
