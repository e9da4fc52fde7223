"""The share of a step that its batch takes, for a recipe's shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import data_loading
from orthros_train.errors import InputError

SMALL = ("--corpus-tokens", "300000", "--repeats", "3")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "loading.json"
    assert data_loading.main(["--output", str(output), *SMALL, "--replicas", "64"]) == 0
    result = json.loads(output.read_text())
    transformer, orthros = result["records"]
    assert transformer["all_seconds"] == orthros["all_seconds"]
    assert len(transformer["all_seconds"]) == 3
    for record in (transformer, orthros):
        assert record["step_seconds"] == pytest.approx(record["step_flops"] / (0.45 * 989.4e12))
        assert record["share_of_step"] == pytest.approx(record["seconds"] / record["step_seconds"])
    # 4 rows of 2,048 tokens; the matrices of the 1.3B alone cost 6 FLOPs a parameter and token, and documents are short
    least, parameters = 6 * 4 * 2048, 1.2e9
    assert least * parameters < transformer["step_flops"] < 1.2 * least * parameters * 1.3 / 1.2
    assert transformer["step_flops"] < orthros["step_flops"] < 2.1 * transformer["step_flops"]
    assert "4 rows of 2,048 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "Abacus"), "--gpu Abacus: its peak is not known; choose one of B200"),
        (("--mfu", "1.5"), "give a share above 0 and at most 1"),
        (
            ("--replicas", "3"),
            "--replicas 3 times train.micro_batch_size 4 does not divide train.global_batch_size 256",
        ),
        (("--config", "absent.yaml"), "absent.yaml does not exist"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        data_loading.main(["--output", str(tmp_path / "x.json"), *arguments])
