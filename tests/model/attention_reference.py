"""What attention is compared with: a softmax written as loops, and flash-attn's varlen call as it is documented."""

import math

import torch
from torch import Tensor


def _seen(p: int, start: int, window: int | None, sinks: int) -> list[int]:
    return [j for j in range(start, p + 1) if window is None or j > p - window or j < start + sinks]


def _one_query(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """All heads (H, d) of one query over the keys (G, s, d) that it sees: (H, d)."""
    H, d = query.shape
    scores = torch.einsum("ghd,gsd->ghs", query.view(keys.shape[0], -1, d), keys) / math.sqrt(d)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.einsum("ghs,gsd->ghd", weights, values).reshape(H, d)


def brute_force(
    queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, first: Tensor, window: int | None, sinks: int
) -> Tensor:
    """One query at a time over a list of the keys that it sees; (B, H, M, d)."""
    rows = []
    for b, (row, starts) in enumerate(zip(positions.tolist(), first.tolist(), strict=True)):
        lists = [_seen(p, start, window, sinks) for p, start in zip(row, starts, strict=True)]
        outputs = [_one_query(queries[b, :, i], keys[b][:, seen], values[b][:, seen]) for i, seen in enumerate(lists)]
        rows.append(torch.stack(outputs, dim=1))
    return torch.stack(rows)


def brute_force_gradients(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    first: Tensor,
    window: int | None,
    sinks: int,
    grad_out: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """`brute_force` and its gradients of queries, keys and values for `grad_out` (B, H, M, d)."""
    out, gradients = torch.empty_like(queries), [torch.zeros_like(part) for part in (queries, keys, values)]
    for b, (row, starts) in enumerate(zip(positions.tolist(), first.tolist(), strict=True)):
        for i, (p, start) in enumerate(zip(row, starts, strict=True)):
            seen = _seen(p, start, window, sinks)
            parts = [queries[b, :, i], keys[b][:, seen], values[b][:, seen]]
            parts = [part.detach().requires_grad_() for part in parts]
            attended = _one_query(*parts)
            query, key, value = torch.autograd.grad(attended, parts, grad_out[b, :, i])
            out[b, :, i], gradients[0][b, :, i] = attended.detach(), query
            gradients[1][b][:, seen] += key
            gradients[2][b][:, seen] += value
    return out, gradients


def random_inputs(B: int, M: int, S: int, seed: int, H: int = 4, G: int = 2, d: int = 4) -> list[Tensor]:
    """Queries (B, H, M, d), keys and values (B, G, S, d), all with gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(B, heads, length, d, dtype=torch.float64, generator=generator).requires_grad_()
        for heads, length in ((H, M), (G, S), (G, S))
    ]


def repeated(queries: Tensor, positions: Tensor, first: Tensor) -> Tensor:
    """Queries (B, H, M, d) in which one that stands where the one before it does repeats it, as unused slots do."""
    columns = torch.arange(positions.shape[1]).expand_as(positions).clone()
    again = (positions[:, 1:] == positions[:, :-1]) & (first[:, 1:] == first[:, :-1])
    columns[:, 1:][again] = 0
    return queries[torch.arange(len(columns))[:, None], :, columns.cummax(1).values].transpose(1, 2)


def reference_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window_size: tuple[int, int],
    deterministic: bool,
) -> Tensor:
    """What flash_attn_varlen_func documents: causal aligned bottom-right, window (left, right) inclusive."""
    assert causal
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    outputs = []
    for run in range(len(cu_seqlens_q) - 1):
        rows = q[cu_seqlens_q[run] : cu_seqlens_q[run + 1]]  # (m, H, d)
        span = slice(int(cu_seqlens_k[run]), int(cu_seqlens_k[run + 1]))
        group = q.shape[1] // k.shape[1]
        keys, values = k[span].repeat_interleave(group, 1), v[span].repeat_interleave(group, 1)
        assert len(rows) <= max_seqlen_q
        assert len(keys) <= max_seqlen_k
        place = torch.arange(len(rows))[:, None] + len(keys) - len(rows)
        visible = torch.arange(len(keys))[None] <= place
        if window_size[0] >= 0:
            visible &= torch.arange(len(keys))[None] >= place - window_size[0]
        scores = torch.einsum("mhd,nhd->hmn", rows, keys) / math.sqrt(q.shape[2])
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hmn,nhd->mhd", weights, values))
    return torch.cat(outputs)
