"""Head and loss together, in chunks of tokens: training never holds the logits of all tokens.

    loss = Σ_i l_i(h_i Wᵀ)      ∂h_i = g_i W      ∂W = Σ_i g_iᵀ h_i      g_i = ∂l_i / ∂(h_i Wᵀ)

* l_i is any function of a token's logits, most often cross entropy, where g_i = softmax(h_i Wᵀ) - onehot(label_i). It
  may compare them with a second model's, which then exist for a chunk at a time, too.
* A sum's gradients are known but for one factor, so each chunk computes its own as soon as it has its logits: no
  product is computed twice, and what waits for the backward is as large as h and W.
* All chunks have their logits in one block of memory, where the slopes g take their place piece by piece: beside it
  only what autograd needs for a piece is ever allocated.
* ∂W adds up over the chunks in at least float32.

Shapes: N tokens, D width, V vocabulary (or a rank's part of it), n tokens of a chunk, m of a piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

CHUNK_TOKENS = 1024  # enough for full GEMMs, to which adding up ∂W is little (docs/LOG.md)
CPU_PIECE_LOGITS = 2**20  # of a piece: what is computed with them stays in the processor's cache


@dataclass(frozen=True)
class TokenLoss:
    """What each token adds to the loss.

    Attributes:
        losses: logits (1, m, V) and labels (1, m) -> losses (1, m) in at least float32, differentiable by the logits;
            0 for a label that is ignored.
        second_head: input (B, M, D') and weight (V, D') of a frozen model's head, if `losses` is to have its logits
            (1, m, V) as the third argument.
    """

    losses: Callable[..., Tensor]
    second_head: tuple[Tensor, Tensor] | None = None


def chunked_loss_sum(hidden: Tensor, weight: Tensor, labels: Tensor, loss: TokenLoss) -> Tensor:
    """The sum of all tokens' losses.

    Args:
        hidden: (B, M, D), the head's input.
        weight: (V, D), the head's.
        labels: (B, M) int64.
        loss: of each token.

    Returns:
        A scalar in at least float32. Gradients reach `hidden` and `weight`, once.
    """
    heads = [(hidden, weight)] if loss.second_head is None else [(hidden, weight), loss.second_head]
    (flat, weight), *others = ((_as_autocast(x.flatten(0, 1)), _as_autocast(w)) for x, w in heads)  # (N, D), (V, D)
    score = _Score(labels.flatten(), loss.losses, others)
    if torch.is_grad_enabled() and (flat.requires_grad or weight.requires_grad):
        return _ChunkedLossSum.apply(flat, weight, score)
    return _loss_and_gradients(flat, weight, score, False, False)[0]


def _as_autocast(tensor: Tensor) -> Tensor:
    """In the dtype of products under autocast, which does not see into what is computed below."""
    device = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else tensor


def _loss_and_gradients(
    hidden: Tensor, weight: Tensor, score: _Score, wants_hidden: bool, wants_weight: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The sum, and its gradients by hidden (N, D) and weight (V, D) as far as they are wanted."""
    N = hidden.shape[0]
    total = hidden.new_zeros((), dtype=_wide(hidden))
    grad_hidden = torch.empty_like(hidden) if wants_hidden else None
    grad_weight = None
    head = _HeadInBlock(hidden, weight)
    for start in range(0, N, CHUNK_TOKENS):
        rows = slice(start, min(start + CHUNK_TOKENS, N))
        chunk, logits = hidden[rows], head.logits(rows)  # (n, D), (n, V)
        total += score(logits, rows, wants_hidden or wants_weight).sum()
        slope = logits  # which `score` has put there
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


class _HeadInBlock:
    """A head (V, D) on `hidden` (N, D) whose logits of one chunk take the place of the last one's."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        self._hidden, self._weight = hidden, weight
        self._block = hidden.new_empty(min(CHUNK_TOKENS, hidden.shape[0]), weight.shape[0])

    def logits(self, rows: slice) -> Tensor:
        """Of the tokens `rows`: (n, V)."""
        return torch.mm(self._hidden[rows], self._weight.mT, out=self._block[: rows.stop - rows.start])


class _Score:
    """Losses of a chunk's tokens, and their slopes."""

    def __init__(self, labels: Tensor, losses: Callable[..., Tensor], others: list[tuple[Tensor, Tensor]]) -> None:
        self._labels, self._losses = labels, losses
        self._others = [_HeadInBlock(*other) for other in others]

    @torch.no_grad()
    def __call__(self, logits: Tensor, rows: slice, wants_slopes: bool) -> Tensor:
        """Losses (n,) of the tokens `rows` with these logits (n, V), whose place the slopes take if they are wanted."""
        n, V = logits.shape
        m = max(1, CPU_PIECE_LOGITS // V) if logits.device.type == "cpu" else n  # elsewhere, calls would cost more
        beside = [self._labels[rows], *(other.logits(rows) for other in self._others)]
        losses = logits.new_empty(n, dtype=_wide(logits))
        for pieces in zip(losses.split(m), logits.split(m), *(each.split(m) for each in beside), strict=True):
            its_losses, its_logits, *its_others = pieces  # (m,), (m, V), (m,), (m, V)
            leaf = its_logits.detach().requires_grad_(wants_slopes)
            with torch.set_grad_enabled(wants_slopes):
                found = self._losses(leaf[None], *(each[None] for each in its_others))[0]
            its_losses.copy_(found)
            if wants_slopes:
                (slope,) = torch.autograd.grad(found, leaf, torch.ones_like(found))
                its_logits.copy_(slope)
        return losses


class _ChunkedLossSum(torch.autograd.Function):
    """Forward computes the gradients for a loss of factor 1, backward multiplies them by the factor."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden: Tensor, weight: Tensor, score: _Score) -> Tensor:
        total, *gradients = _loss_and_gradients(hidden, weight, score, *ctx.needs_input_grad[:2])  # type: ignore[attr-defined]
        ctx.save_for_backward(*gradients)  # type: ignore[arg-type]
        ctx.dtype = weight.dtype  # type: ignore[attr-defined]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, factor: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """`factor` is wide, and rounded nowhere: a rounded one would bias every gradient of the model."""
        grad_hidden, grad_weight = (
            None if each is None else (each.to(factor.dtype) * factor).to(ctx.dtype)  # type: ignore[attr-defined]
            for each in ctx.saved_tensors  # type: ignore[attr-defined]
        )
        return grad_hidden, grad_weight, None


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
