"""Every kernel on every kind of mask at the block sizes that runs have, on a CPU and on a GPU where there is one.

A CPU also runs what a GPU would: blocks whose backward recomputes them, alone and folded, and flash's packing around a
reference of flash-attn's call. The reference is computed one query at a time, in double precision, of the same inputs.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from orthros_train.model import attention_kernels
from orthros_train.model import visibility as visibility_module
from orthros_train.model.attention_kernels import attend, choose_kernel
from orthros_train.model.flash_runs import attend_runs, reads_runs
from orthros_train.model.stream_layout import computed_columns
from orthros_train.model.visibility import Visibility
from tests.model.attention_reference import brute_force_gradients, reference_flash
from tests.model.tiny import assert_close

# Outputs and gradients. bfloat16 rounds the softmax's weights and every result to 8 bits, 4e-3 of each.
BOUNDS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 3e-2)}


@dataclass(frozen=True)
class Mask:
    """Positions and segment starts (B or 1, M) of queries over S keys."""

    positions: Tensor
    first: Tensor
    keys: int
    window: int | None = None
    sinks: int = 0
    contiguous_from: int | None = None
    gradients: bool = True


def contiguous(count: int, past: int = 0, **rest) -> Mask:
    positions = torch.arange(past, past + count)[None]
    return Mask(positions, torch.zeros_like(positions), past + count, contiguous_from=past, **rest)


def packed(window: int | None, sinks: int = 0) -> Mask:
    positions = torch.arange(700).expand(2, -1)
    starts = torch.tensor([[0, 300, 310], [0, 0, 450]])
    first = (starts[:, None] * (starts[:, None] <= positions[..., None])).amax(-1)
    return Mask(positions, first, 700, window, sinks)


def answer_spans() -> Mask:
    """Two spans in the first row; one and unused slots, which read one key, in the second."""
    columns = torch.tensor([[*range(150, 250), *range(420, 560)], [*range(30, 100), *[-1] * 170]])
    positions = computed_columns(columns)
    return Mask(positions, torch.where(columns < 0, positions, 0), 600)


MASKS = {
    "causal": contiguous(500),
    "window": contiguous(900, window=200),
    "window of 1": contiguous(300, window=1),
    "window and sinks": contiguous(900, window=200, sinks=4),
    "packed": packed(None),
    "packed, window": packed(200),
    "packed, window and sinks": packed(200, 4),
    "answer spans": answer_spans(),
    "chunk": contiguous(300, past=333, gradients=False),
    "chunk, window": contiguous(700, past=333, window=200, gradients=False),
    "chunk, window and sinks": contiguous(700, past=333, window=200, sinks=1, gradients=False),
    "decoding": contiguous(1, past=600, gradients=False),
    "decoding, window and sinks": contiguous(1, past=600, window=200, sinks=4, gradients=False),
    "ragged decoding": Mask(torch.tensor([[37], [600]]), torch.zeros(2, 1, dtype=torch.int64), 601, gradients=False),
    "ragged decoding, window and sinks": Mask(
        torch.tensor([[37], [600]]), torch.zeros(2, 1, dtype=torch.int64), 601, 200, 4, gradients=False
    ),
}
B, H, G, D = 2, 4, 2, 64


def unused(mask: Mask) -> Tensor:
    """(B, 1, M, 1): slots that repeat the one before; nothing reads what they give, and it has no gradient."""
    repeats = torch.zeros(B, mask.positions.shape[1], dtype=torch.bool)
    repeats[:, 1:] = mask.positions[:, 1:] == mask.positions[:, :-1]
    return repeats[:, None, :, None]


@cache
def reference(name: str) -> tuple[list[Tensor], Tensor, Tensor, list[Tensor]]:
    """Inputs and a gradient of the output that bfloat16 can hold; the output and its gradients. All in double."""
    mask, generator = MASKS[name], torch.Generator().manual_seed(0)
    M, S = mask.positions.shape[1], mask.keys
    shapes = ((B, H, M, D), (B, G, S, D), (B, G, S, D), (B, H, M, D))
    *inputs, weight = (torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes)
    weight = weight.masked_fill(unused(mask), 0)
    positions, first = mask.positions.expand(B, M), mask.first.expand(B, M)
    out, gradients = brute_force_gradients(*inputs, positions, first, mask.window, mask.sinks, weight)
    return inputs, weight, out, gradients


def check(name: str, device: str, dtype: torch.dtype, kernel: str) -> None:
    """Outputs, and gradients where the mask has them."""
    mask = MASKS[name]
    given, weight, expected, wanted = reference(name)
    inputs = [part.to(device, dtype).requires_grad_(mask.gradients) for part in given]
    on_device = (mask.positions.to(device), mask.first.to(device))
    visibility = Visibility(*on_device, mask.window, mask.sinks, mask.contiguous_from)
    if kernel == "reference flash":
        actual = attend_runs(*inputs, visibility, reference_flash)
    else:
        actual = attend(*inputs, visibility, kernel)
    bound, gradient_bound = BOUNDS[dtype]
    assert actual.dtype == dtype
    used = ~unused(mask)
    assert_close(actual.cpu().double() * used, expected * used, bound)
    if mask.gradients:
        for gradient, exact in zip(torch.autograd.grad(actual, inputs, weight.to(device, dtype)), wanted, strict=True):
            assert_close(gradient.cpu().double(), exact, gradient_bound)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "recomputed", "folded", "reference flash"])
@pytest.mark.parametrize("name", MASKS)
def test_on_a_cpu(name, kernel, dtype, monkeypatch):
    """`recomputed` and `folded` are sdpa with a GPU's backward and with a GPU's calls."""
    if kernel in ("recomputed", "folded"):
        monkeypatch.setattr(attention_kernels, "KEEPS_SUMS", ())
    if kernel == "folded":
        monkeypatch.setattr(visibility_module, "FOLDED_ON", ("cpu",))
    if kernel == "reference flash":
        mask = MASKS[name]
        if not reads_runs(Visibility(mask.positions, mask.first, mask.window, mask.sinks)):
            pytest.skip("flash leaves such a mask to sdpa")
    check(name, "cpu", dtype, kernel if kernel in ("eager", "reference flash") else "sdpa")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kernel", ["eager", "sdpa", "flex", "flash"])
@pytest.mark.parametrize("name", MASKS)
def test_on_a_gpu(name, kernel, dtype):
    """A kernel that cannot run there is skipped with its reason."""
    try:
        choose_kernel(kernel, torch.device("cuda"), dtype, True, D)
    except ValueError as error:
        pytest.skip(str(error))
    check(name, "cuda", dtype, kernel)


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
@pytest.mark.parametrize("folded", [False, True])
def test_strongly_negative_logits_at_704_keys(device, folded, monkeypatch):
    """pytorch#196678: blocks of a window of 512 with one sink, where cuDNN's gradient of queries is NaN."""
    monkeypatch.setattr(visibility_module, "MIN_BLOCK", 192)
    monkeypatch.setattr(visibility_module, "FOLDED_ON", (device,) if folded else ())
    monkeypatch.setattr(attention_kernels, "KEEPS_SUMS", ())
    positions = torch.arange(192 * 6)[None]
    visibility = Visibility(positions.to(device), torch.zeros_like(positions).to(device), 512, 1, contiguous_from=0)
    assert any(block.key_count == 704 for block in visibility.blocks(192 * 6, torch.bfloat16))
    generator = torch.Generator().manual_seed(0)
    scales = (0.1, 0.1, 1.0)
    parts = [torch.randn(1, 1, 192 * 6, D, generator=generator) * scale for scale in scales]
    parts[0][..., 0], parts[1][..., 0] = 1.0, -120 * D**0.5  # every logit about -120
    inputs = [part.to(device, torch.bfloat16).requires_grad_() for part in parts]
    weight = torch.randn(parts[0].shape, generator=generator).bfloat16()
    exact = [part.detach().cpu().double() for part in (*inputs, weight)]
    expected, wanted = brute_force_gradients(*exact[:3], positions, torch.zeros_like(positions), 512, 1, exact[3])
    actual = attend(*inputs, visibility, "sdpa")
    gradients = torch.autograd.grad(actual, inputs, weight.to(device))
    assert_close(actual.cpu().double(), expected, 2e-2)
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert_close(gradients[2].cpu().double(), wanted[2], 3e-2)
