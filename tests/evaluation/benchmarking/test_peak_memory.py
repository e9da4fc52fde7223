"""Memory is measured where it grows, after what the process held before; a failing child is one line."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import prefill, training_step
from evaluation import ttft
from evaluation.benchmarking.peak_memory import in_own_process, memory_growth_mib
from orthros_train.errors import InputError
from tests.benchmarks.shapes import QUICK
from tests.evaluation.tiny_models import save_orthros


def test_growth_is_what_the_work_held_at_most() -> None:
    def work() -> None:
        torch.ones(64 * 2**18)  # 64 MiB, given back at once
        torch.ones(32 * 2**18)

    assert 60 < memory_growth_mib(work) < 80


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators give free memory back by themselves")
def test_memory_that_is_free_is_not_held() -> None:
    many = [torch.ones(2**14) for _ in range(512)]  # 32 MiB in pieces that the allocator keeps
    many.clear()
    assert 28 < memory_growth_mib(lambda: [torch.ones(2**14) for _ in range(512)]) < 48


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the record of the highest size cannot be reset")
def test_an_earlier_peak_hides_nothing() -> None:
    torch.ones(256 * 2**18)  # 256 MiB
    assert 30 < memory_growth_mib(lambda: torch.ones(32 * 2**18)) < 48


def test_a_child_answers_in_json() -> None:
    assert in_own_process(["-c", "print('words'); print([1, 2.5])"], "it") == [1, 2.5]


def test_a_child_finds_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch keeps of a GPU's memory is given back before a child starts, models in cycles included."""
    order: list[str] = []

    class Model:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            order.append("model freed")

    def start(*arguments: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        order.append("child started")
        return subprocess.CompletedProcess([], 0, "1", "")

    monkeypatch.setattr("torch.cuda.empty_cache", lambda: order.append("cache emptied"))
    monkeypatch.setattr("subprocess.run", start)
    Model()
    assert in_own_process(["-c", ""], "it") == 1
    assert order == ["model freed", "cache emptied", "child started"]


def test_no_child_starts_beside_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmarks' own models are gone when the processes that measure peaks start."""
    models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
    alive: list[int] = []
    build = PreTrainedModel.__init__

    def counted(model: PreTrainedModel, *arguments: Any, **options: Any) -> None:
        build(model, *arguments, **options)
        models.add(model)

    def child(command: list[str], what: str) -> Any:
        gc.collect()
        alive.append(len(models))
        return {"peak_memory_gib": 1.0} if "--prompt-lengths" in command else 1.0

    save_orthros(tmp_path / "model")
    monkeypatch.setattr(PreTrainedModel, "__init__", counted)
    monkeypatch.setattr("evaluation.benchmarking.peak_memory.in_own_process", child)
    monkeypatch.setattr("evaluation.ttft.in_own_process", child)
    output = ["--output", str(tmp_path / "x.json")]
    training_step.main([*output, *QUICK, "--length", "8", "--repeats", "1", "--uses", "sft", "--peak-memory"])
    prefill.main([*output, *QUICK, "--lengths", "8", "--repeats", "1", "--peak-memory"])
    ttft.main([*output, "--model", str(tmp_path / "model"), "--prompt-lengths", "8", "--repeats", "1"])
    assert alive == [0] * (3 + 3 + 2)


def test_a_failing_child() -> None:
    code = "import sys; print('much'); print('error: no such thing', file=sys.stderr); sys.exit(2)"
    with pytest.raises(InputError, match="peak of x cannot be measured: exit code 2, no such thing"):
        in_own_process(["-c", code], "the peak of x")
