"""tools/plan.py as a user meets it."""

from __future__ import annotations

from pathlib import Path

import pytest

from orthros_train.config import load_config
from tests.tools.command import ROOT, run_here

CONFIG = str(ROOT / "configs" / "orthros_1.3b.yaml")


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run_here("plan", *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_the_best_layout_is_printed_as_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stdout, _ = plan(monkeypatch, capsys, CONFIG, "--nodes", "2", "--show", "3")
    assert code == 0
    assert "1,298,954,240 parameters" in stdout
    assert "assumed: H100 with 80 GiB of which 8 stay free" in stdout
    (heading,) = [line for line in stdout.splitlines() if line.split()[:2] == ["tensor", "pipeline"]]
    assert "gradients" in heading
    assert " KV " in heading
    assert "KV: keys and values of micro rows of 2,048 tokens" in stdout
    assert "3: " in stdout
    assert "4: " not in stdout
    load_config(Path(CONFIG), stdout.splitlines()[-1].split())


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, stdout, _ = plan(monkeypatch, capsys, CONFIG, "--gpus-per-node", "1", "--memory-gib", "12")
    assert code == 1
    assert "nothing fits 1 x H100; the one that needs least:" in stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision=fp32"], "GPUs are planned for precision: bf16"),
        (["--gpu", "Abacus"], "--gpu"),
        (["--efficiency", "0"], "--efficiency: must be above 0"),
        (["--nodes", "7", "--gpus-per-node", "7"], "no layout of 49 GPUs is possible"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, stdout, stderr = plan(monkeypatch, capsys, CONFIG, *arguments)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1
