"""Head and loss together, in chunks of tokens: training never holds the logits of all tokens.

    loss = Σ_i l_i(h_i Wᵀ)      ∂h_i = g_i W      ∂W = Σ_i g_iᵀ h_i      g_i = ∂l_i / ∂(h_i Wᵀ)

* l_i is any function of a token's logits, most often cross entropy, where g_i = softmax(h_i Wᵀ) - onehot(label_i).
* A sum's gradients are known but for one factor, so each chunk computes its own as soon as it has its logits: no
  product is computed twice, and what waits for the backward is as large as h and W.
* All chunks have their logits in one block of memory, where the slopes g take their place piece by piece: beside it
  only what autograd needs for a piece is ever allocated.
* ∂W adds up over the chunks in at least float32.

Shapes: N tokens, D width, V vocabulary (or a rank's part of it), n tokens of a chunk, m of a piece.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_TOKENS = 1024  # enough for full GEMMs, to which adding up ∂W is little (docs/LOG.md)
CPU_PIECE_LOGITS = 2**20  # of a piece: what is computed with them stays in the processor's cache

TokenLosses = Callable[[Tensor, Tensor, slice], Tensor]
"""Logits (m, V), labels (m,) and which of the N tokens they belong to -> losses (m,) in at least float32."""


def chunked_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, token_losses: TokenLosses) -> Tensor:
    """The sum of all tokens' losses.

    Args:
        hidden: (B, M, D), the head's input.
        weight: (V, D), the head's.
        labels: (B, M) int64.
        token_losses: each token's loss, differentiable by the logits; 0 for a label that is ignored. N = B·M.

    Returns:
        A scalar in at least float32. Gradients reach `hidden` and `weight`, once.
    """
    flat, labels = hidden.flatten(0, 1), labels.flatten()  # (N, D), (N,)
    device = flat.device.type
    if torch.is_autocast_enabled(device):  # it does not see into what is computed below
        flat, weight = flat.to(torch.get_autocast_dtype(device)), weight.to(torch.get_autocast_dtype(device))
    if torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad):
        return _ChunkedLossSum.apply(flat, weight, labels, token_losses)
    return _loss_and_gradients(flat, weight, labels, token_losses, False, False)[0]


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, labels: Tensor, token_losses: TokenLosses, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum, and its gradients by hidden (N, D) and weight (V, D) as far as they are wanted."""
    N, V = hidden.shape[0], weight.shape[0]
    total = hidden.new_zeros((), dtype=_wide(hidden))
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight = None
    block = hidden.new_empty(min(CHUNK_TOKENS, N), V)
    for start in range(0, N, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, N))
        chunk, logits = hidden[rows], block[: rows.stop - start]  # (n, D), (n, V)
        torch.mm(chunk, weight.mT, out=logits)
        total += _score(logits, labels, rows, token_losses, wants_hidden or wants_weight).sum()
        slope = logits  # which `_score` has put there
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
    return total, grad_hidden, grad_weight


@torch.no_grad()
def _score(logits: Tensor, labels: Tensor, rows: slice, token_losses: TokenLosses, wants_slopes: bool) -> Tensor:
    """Losses (n,) of the tokens `rows` with these logits (n, V), whose place the slopes take if they are wanted."""
    n, V = logits.shape
    m = max(1, CPU_PIECE_LOGITS // V) if logits.device.type == "cpu" else n  # elsewhere, calls would cost more
    losses = logits.new_empty(n, dtype=_wide(logits))
    for start in range(0, n, m):
        piece = logits[start : start + m].detach()  # (m, V)
        its_rows = slice(rows.start + start, rows.start + start + len(piece))
        with torch.set_grad_enabled(wants_slopes):
            its_losses = token_losses(piece.requires_grad_(wants_slopes), labels[its_rows], its_rows)
        losses[start : start + m] = its_losses
        if wants_slopes:
            (slope,) = torch.autograd.grad(its_losses, piece, torch.ones_like(its_losses))
            piece.detach().copy_(slope)
    return losses


class _ChunkedLossSum(torch.autograd.Function):
    """Forward computes the gradients for a loss of factor 1, backward multiplies them by the factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, labels: Tensor, token_losses: TokenLosses) -> Tensor:
        total, *gradients = _loss_and_gradients(
            hidden,
            weight,
            labels,
            token_losses,
            *ctx.needs_input_grad[:2],  # type: ignore[attr-defined]
        )
        ctx.save_for_backward(*gradients)  # type: ignore[arg-type]
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
