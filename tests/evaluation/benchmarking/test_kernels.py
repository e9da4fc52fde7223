"""The profile names the operators that take the time."""

from __future__ import annotations

import pytest
import torch

from evaluation.benchmarking.kernels import largest_kernels, print_kernels


def test_the_product_is_the_largest(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.randn(300, 300), torch.randn(10)
    found = largest_kernels(lambda: (a @ a @ a, b + b), "cpu", count=3)
    assert len(found) <= 3
    assert (found[0]["name"], found[0]["calls"]) == ("aten::mm", 2)
    assert found[0]["milliseconds"] >= found[1]["milliseconds"] > 0
    assert 0.5 < found[0]["share"] <= 1
    print_kernels("orthros", found)
    assert "orthros: largest kernels" in capsys.readouterr().out
