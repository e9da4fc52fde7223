"""The plain layers against PyTorch's own."""

import pytest
import torch
import torch.nn.functional as F

from orthros_train.model.layer_factory import Linear
from tests.model.tiny import assert_close


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (1, 3), (3,), (4, 1), (0, 2)], ids=str)
def test_few_rows_are_the_same_product(shape: tuple[int, ...], bias: bool) -> None:
    linear = Linear(5, 7, bias=bias).double()
    x = torch.randn(*shape[:-1], 5, shape[-1], dtype=torch.float64).mT.requires_grad_()  # rows that are not contiguous
    expected, actual = F.linear(x, linear.weight, linear.bias), linear(x)
    assert_close(actual, expected)
    weight, inputs = torch.randn_like(expected), [x, *linear.parameters()]
    wanted, given = (torch.autograd.grad((each * weight).sum(), inputs) for each in (expected, actual))
    for gradient, reference in zip(given, wanted, strict=True):
        assert_close(gradient, reference)


@pytest.mark.parametrize("rows", [2, 3])
def test_few_rows_take_the_product_that_reads_the_weights_once(rows: int) -> None:
    """W xᵀ: the profile holds a product of (out, in) by (in, rows)."""
    linear, x = Linear(5, 7, bias=False), torch.randn(1, rows, 5)
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        linear(x)
    assert [[7, 5], [5, rows]] in [event.input_shapes for event in profile.events() if event.name == "aten::mm"]
