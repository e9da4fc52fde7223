"""Head and cross entropy together, in chunks of tokens: training never holds the logits of all tokens.

    loss = Σ_i CE(h_i Wᵀ, label_i)      ∂h_i = g_i W      ∂W = Σ_i g_iᵀ h_i      g_i = softmax(h_i Wᵀ) - onehot(label_i)

* A sum's gradients are known but for one factor, so each chunk computes its own as soon as it has its logits and drops
  them: no product is computed twice, and what waits for the backward is as large as h and W.
* All chunks have their logits in one block of memory and their slopes g in another one.
* ∂W adds up over the chunks in at least float32.

Shapes: N tokens, D width, V vocabulary (or a rank's part of it), n tokens of a chunk.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_TOKENS = 1024  # enough for full GEMMs, to which adding up ∂W is little (docs/LOG.md)


class VocabularyLoss(Protocol):
    """Cross entropy over the vocabulary, or over all ranks' parts of it: what a layer factory offers."""

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits (1, n, V) and labels (1, n) -> losses (1, n); 0 for a label that is ignored."""

    def cross_entropy_slopes(self, logits: Tensor, labels: Tensor, slopes: Tensor) -> Tensor:
        """Logits (n, V) and labels (n,) -> losses (n,), 0 for a label that is ignored; writes `slopes` (n, V)."""


def chunked_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyLoss) -> Tensor:
    """The sum of all tokens' losses.

    Args:
        hidden: (B, M, D), the head's input.
        weight: (V, D), the head's.
        labels: (B, M) int64.
        vocabulary: the cross entropy.

    Returns:
        A scalar in at least float32. Gradients reach `hidden` and `weight`, once.
    """
    flat, labels = hidden.flatten(0, 1), labels.flatten()  # (N, D), (N,)
    device = flat.device.type
    if torch.is_autocast_enabled(device):  # it does not see into what is computed below
        flat, weight = flat.to(torch.get_autocast_dtype(device)), weight.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad):
        return _ChunkedLossSum.apply(flat, weight, labels, vocabulary)
    total = flat.new_zeros((), dtype=_wide(flat))
    for chunk, its_labels in zip(flat.split(CHUNK_TOKENS), labels.split(CHUNK_TOKENS), strict=True):
        total += vocabulary.cross_entropy(F.linear(chunk, weight)[None], its_labels[None]).sum()
    return total


class _ChunkedLossSum(torch.autograd.Function):
    """Forward computes the gradients for a loss of factor 1, backward multiplies them by the factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary: VocabularyLoss) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]  # type: ignore[attr-defined]
        total = hidden.new_zeros((), dtype=_wide(hidden))
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = None
        room = hidden.new_empty(min(CHUNK_TOKENS, hidden.shape[0]), weight.shape[0])
        wide_room = torch.empty_like(room, dtype=_wide(hidden))
        for start in range(0, hidden.shape[0], CHUNK_TOKENS):
            rows = slice(start, start + CHUNK_TOKENS)
            chunk = hidden[rows]  # (n, D)
            logits, slopes = room[: len(chunk)], wide_room[: len(chunk)]  # (n, V)
            torch.mm(chunk, weight.mT, out=logits)
            total += vocabulary.cross_entropy_slopes(logits, labels[rows], slopes).sum()
            slope = slopes if slopes.dtype == logits.dtype else logits.copy_(slopes)
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
