"""flash-attn for both streams: every run of consecutive queries is one sequence of its varlen kernel.

A run is a stretch of queries of one row at consecutive positions of one segment: the whole segment for the base
stream, an answer span for the output stream of fine-tuning. Its last query is aligned with its last key, which is
flash-attn's bottom-right causal mask, and `window_size=(w-1, 0)` is our w.

Shapes: B batch, M queries, S keys, H query heads, G KV heads, d head size, R runs.
"""

import importlib.util

import torch
from torch import Tensor

from .visibility import Visibility


def flash_obstacle(device: torch.device, dtype: torch.dtype, sinks: int) -> str | None:
    """Why flash cannot run here, or None."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn needs bfloat16 or float16, not {dtype}"
    if sinks:
        return f"flash-attn's window has no sinks (base_sinks={sinks})"
    return None


def flash(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """(B, H, M, d) over (B, G, S, d) -> (B, H, M, d) through flash_attn_varlen_func."""
    from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional, CUDA only

    return attend_runs(queries, keys, values, visibility, flash_attn_varlen_func)


def attend_runs(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, varlen_attention) -> Tensor:  # type: ignore[no-untyped-def]
    """Pack runs, call `varlen_attention` with flash_attn_varlen_func's arguments, unpack."""
    B, H, M, d = queries.shape
    query_starts, rows, key_low, key_high = _runs(visibility, B, M)
    key_lengths = key_high - key_low + 1  # (R,)
    key_starts = _starts(key_lengths)  # (R + 1,)
    offsets = torch.arange(int(key_starts[-1]), device=keys.device) - key_starts[:-1].repeat_interleave(key_lengths)
    picked = (rows * keys.shape[2] + key_low).repeat_interleave(key_lengths) + offsets  # index into (B·S)
    out = varlen_attention(
        queries.transpose(1, 2).reshape(B * M, H, d),
        keys.transpose(1, 2).flatten(0, 1)[picked],
        values.transpose(1, 2).flatten(0, 1)[picked],
        cu_seqlens_q=query_starts.int(),
        cu_seqlens_k=key_starts.int(),
        max_seqlen_q=int(query_starts.diff().max()),
        max_seqlen_k=int(key_lengths.max()),
        causal=True,
        window_size=(-1, -1) if visibility.window is None else (visibility.window - 1, 0),
    )
    return out.view(B, M, H, d).transpose(1, 2)


def _runs(visibility: Visibility, B: int, M: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Starts in the flattened queries (R + 1,), and each run's row, first key and last key, each (R,)."""
    positions, first = visibility.positions.expand(B, M), visibility.first.expand(B, M)
    new = torch.ones(B, M, dtype=torch.bool, device=positions.device)
    new[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1) | (first[:, 1:] != first[:, :-1])
    begins = new.flatten().nonzero().flatten()  # (R,)
    ends = torch.cat((begins[1:], begins.new_tensor([B * M])))
    low = first.flatten()[begins]
    if visibility.window is not None:
        low = torch.maximum(low, positions.flatten()[begins] - visibility.window + 1)
    return torch.cat((begins, begins.new_tensor([B * M]))), begins // M, low, positions.flatten()[ends - 1]


def _starts(lengths: Tensor) -> Tensor:
    """Lengths (R,) -> exclusive prefix sums with the total at the end (R + 1,)."""
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
