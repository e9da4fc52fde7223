"""Head and cross entropy together, in chunks of tokens: training never holds the logits of all tokens.

    loss = Σ_i CE(h_i Wᵀ, label_i)      ∂h_i = g_i W      ∂W = Σ_i g_iᵀ h_i      g_i = softmax(h_i Wᵀ) - onehot(label_i)

* A sum's gradients are known but for one factor, so each chunk computes its own as soon as it has its logits and drops
  them: no product is computed twice, and what waits for the backward is as large as h and W.
* ∂W adds up over the chunks in at least float32.

Shapes: N tokens, D width, V vocabulary (or a rank's part of it), n tokens of a chunk.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_TOKENS = 1024  # enough for full GEMMs, to which adding up ∂W is little (docs/LOG.md)

TokenLosses = Callable[[Tensor, Tensor], Tensor]  # logits (1, n, V) and labels (1, n) -> losses (1, n)


def chunked_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, token_losses: TokenLosses) -> Tensor:
    """The sum of all tokens' losses.

    Args:
        hidden: (B, M, D), the head's input.
        weight: (V, D), the head's.
        labels: (B, M) int64.
        token_losses: the cross entropy; 0 for a label that is ignored.

    Returns:
        A scalar in at least float32. Gradients reach `hidden` and `weight`, once.
    """
    flat, labels = hidden.flatten(0, 1), labels.flatten()  # (N, D), (N,)
    device = flat.device.type
    if torch.is_autocast_enabled(device):  # it does not see into what is computed below
        flat, weight = flat.to(torch.get_autocast_dtype(device)), weight.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad):
        return _ChunkedLossSum.apply(flat, weight, labels, token_losses)
    total = flat.new_zeros((), dtype=_wide(flat))
    for chunk, its_labels in zip(flat.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        total += token_losses(F.linear(chunk, weight)[None], its_labels[None]).sum()
    return total


class _ChunkedLossSum(torch.autograd.Function):
    """Forward computes the gradients for a loss of factor 1, backward multiplies them by the factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, token_losses: TokenLosses) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        total = hidden.new_zeros((), dtype=_wide(hidden))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            chunk = hidden[rows]  # (n, D)
            logits = F.linear(chunk, weight).requires_grad_()  # (n, V)
            with torch.enable_grad():
                loss = token_losses(logits[None], labels[None, rows]).sum()
            (slope,) = torch.autograd.grad(loss, logits)  # (n, V)
            total += loss.detach()
            if grad_hidden is not None:
                torch.mm(slope, weight, out=grad_hidden[rows])
            if not wants_weight:
                continue
            if grad_weight is None:
                grad_weight = (slope.mT @ chunk).to(_wide(weight))  # (V, D)
            elif grad_weight.dtype == chunk.dtype:
                grad_weight.addmm_(slope.mT, chunk)
            else:
                grad_weight += slope.mT @ chunk
        if wants_weight and grad_weight is None:  # no tokens
            grad_weight = torch.zeros_like(weight, dtype=_wide(weight))
        ctx.save_for_backward(grad_hidden, grad_weight)  # type: ignore[arg-type]
        ctx.dtype = weight.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, factor: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """`factor` is wide, and rounded nowhere: a rounded one would bias every gradient of the model."""
        grad_hidden, grad_weight = (
            None if each is None else (each.to(factor.dtype) * factor).to(ctx.dtype)  # type: ignore[attr-defined]
            for each in ctx.saved_tensors  # type: ignore[attr-defined]
        )
        return grad_hidden, grad_weight, None, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
