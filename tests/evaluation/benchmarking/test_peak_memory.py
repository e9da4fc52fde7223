"""Memory is measured where it grows, after what the process held before; a failing child is one line."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from evaluation.benchmarking.peak_memory import in_own_process, memory_growth_mib
from orthros_train.errors import InputError


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


def test_a_failing_child() -> None:
    code = "import sys; print('much'); print('error: no such thing', file=sys.stderr); sys.exit(2)"
    with pytest.raises(InputError, match="peak of x cannot be measured: exit code 2, no such thing"):
        in_own_process(["-c", code], "the peak of x")
