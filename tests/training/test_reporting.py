"""What a person reads while training, and the peaks that MFU divides by."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.training.device_peaks import known_peak_flops, peak_flops
from orthros_train.training.metrics import peak_resident_bytes
from orthros_train.training.progress_report import ProgressReport, describe_step, describe_suites
from tests.training.small_runs import small_config

RECORD: dict[str, Any] = {
    "step": 4,
    "loss": 2.5,
    "learning_rate": 3e-4,
    "grad_norm": 0.75,
    "tokens_per_second": 12345.6,
    "step_seconds": 30.0,
    "mfu_exact": None,
    "skipped_steps": 0,
}


def test_a_step_in_one_line() -> None:
    assert describe_step(RECORD, 10) == (
        "step 4/10 | loss 2.5000 | lr 0.0003 | grad norm 0.750 | 12,346 tokens/s | 0:03:00 left"
    )
    late = {**RECORD, "step": 10, "mfu_exact": 0.4321, "skipped_steps": 2, "validation_loss": 2.25}
    assert describe_step(late, 10) == (
        "step 10/10 | loss 2.5000 | lr 0.0003 | grad norm 0.750 | 12,346 tokens/s | MFU 43.2% | skipped 2 | "
        "validation loss 2.2500"
    )
    assert "loss none | lr 0.0003 | grad norm none" in describe_step({**RECORD, "loss": None, "grad_norm": None}, 10)


def test_lines_appear_at_the_interval_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    report = ProgressReport(steps=5, first_step=0, interval_steps=2, shown=True)
    for step in range(1, 6):
        report.step({**RECORD, "step": step})
    report.warn("careful")
    report.close()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0] for line in lines] == ["step 2/5", "step 4/5", "step 5/5", "warning: careful"]


def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    report = ProgressReport(steps=1, first_step=0, interval_steps=1, shown=False)
    report.step({**RECORD, "step": 1})
    report.say("nothing")
    report.close()
    assert capsys.readouterr().out == ""


def test_a_pipe_gets_each_line_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as stream, monkeypatch.context() as patch:  # block-buffered, as Python opens a pipe
        patch.setattr(sys, "stdout", stream)
        report = ProgressReport(steps=2, first_step=0, interval_steps=1, shown=True)
        report.say("a line")
        os.set_blocking(read, False)
        assert os.read(read, 100) == b"a line\n"
    os.close(read)


def test_the_bar_is_shown_once_training_starts_and_steps_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich, a terminal
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    report = ProgressReport(steps=2, first_step=0, interval_steps=1, shown=True)
    bar = report._bar
    assert bar is not None
    assert not bar.live.is_started, "preparing may fail"
    report.start()
    assert bar.live.is_started
    with report.paused():
        assert not bar.live.is_started
    assert bar.live.is_started
    report.close()
    assert not bar.live.is_started


def test_scores_of_suites_in_one_line() -> None:
    scores = {"a/x/acc": 0.5, "a/y/acc": 0.25, "a/mean": 0.375, "b/text/byte_perplexity": 3.0, "b/other/acc": None}
    assert describe_suites(scores) == "a/mean 0.3750 | b/text/byte_perplexity 3.0000 | b/other/acc none"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A100 80GB PCIe", 311.9),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
    ],
)
def test_known_devices(name: str, tflops: float) -> None:
    assert known_peak_flops(name) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize("name", ["Tesla V100-SXM2-16GB", "NVIDIA H1000", "AMD Instinct MI300X"])
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert known_peak_flops(name) is None


def test_a_given_peak_counts_everywhere(tmp_path: Path, corpus: Path) -> None:
    cpu = torch.device("cpu")
    assert peak_flops(small_config(tmp_path, corpus, logging__peak_tflops=2.0), cpu) == 2e12
    assert peak_flops(small_config(tmp_path, corpus), cpu) is None


def test_peak_memory_is_this_process_alone() -> None:
    """Not that of a larger process which started it."""
    ballast = b"x" * (600 * 2**20)
    program = "from orthros_train.training.metrics import peak_resident_bytes as peak; print(peak())"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 2**20 < int(answer.stdout) < peak_resident_bytes() - 50 * 2**20
    assert peak_resident_bytes() > len(ballast)
