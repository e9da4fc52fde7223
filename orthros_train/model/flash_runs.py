"""flash-attn for both streams: every run of consecutive queries is one sequence of its varlen kernel.

A run is a stretch of queries of one row at consecutive positions of one segment: the whole segment for the base
stream, an answer span for the output stream of fine-tuning. Its last query is aligned with its last key, which is
flash-attn's bottom-right causal mask, and `window_size=(w-1, 0)` is our w. A query that repeats the one before it
(padding, an unused slot) is computed once.

Shapes: B batch, M queries, S keys, H query heads, G KV heads, d head size, Q distinct queries, R runs.
"""

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .visibility import Visibility


def flash_obstacle(device: torch.device, dtype: torch.dtype, sinks: int) -> str | None:
    """Why flash cannot run here, or None."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    if (problem := _import_problem()) is not None:
        return problem
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn needs bfloat16 or float16, not {dtype}"
    if sinks:
        return f"flash-attn's window has no sinks (base_sinks={sinks})"
    return None


@cache
def _import_problem() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:  # built for another torch
        return f"the package flash-attn cannot be imported ({error})"
    return None


def flash(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """(B, H, M, d) over (B, G, S, d) -> (B, H, M, d) through flash_attn_varlen_func."""
    from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional, CUDA only

    return attend_runs(queries, keys, values, visibility, flash_attn_varlen_func)


def attend_runs(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, varlen_attention) -> Tensor:  # type: ignore[no-untyped-def]
    """Pack runs, call `varlen_attention` with flash_attn_varlen_func's arguments, unpack."""
    B, H, M, d = queries.shape
    runs = visibility.prepared.get((B, keys.shape[2]))
    if runs is None:
        runs = visibility.prepared[B, keys.shape[2]] = _find_runs(visibility, B, M, keys.shape[2])
    packed = queries.transpose(1, 2).reshape(B * M, H, d)
    out = varlen_attention(
        _chosen(packed, runs.distinct),
        _chosen(keys.transpose(1, 2).flatten(0, 1), runs.keys),
        _chosen(values.transpose(1, 2).flatten(0, 1), runs.keys),
        cu_seqlens_q=runs.query_starts,
        cu_seqlens_k=runs.key_starts,
        max_seqlen_q=runs.most_queries,
        max_seqlen_k=runs.most_keys,
        causal=True,
        window_size=(-1, -1) if visibility.window is None else (visibility.window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return (out if runs.distinct is None else out[runs.place]).view(B, M, H, d).transpose(1, 2)


def _chosen(packed: Tensor, which: Tensor | None) -> Tensor:
    """The tokens that a call takes of all (tokens, heads, d), without a copy where it takes all."""
    return packed if which is None else packed.index_select(0, which)


@dataclass(frozen=True)
class _Runs:
    """The packing of one call, the same in every layer.

    Attributes:
        distinct: (Q,), which of the B·M queries are computed; None: all of them.
        place: (B·M,), where among the distinct ones each query is.
        keys: which of the B·S keys each run reads, one run after the other; None: all of them in order.
        query_starts: (R + 1,) int32, where each run's queries start, and the end.
        key_starts: (R + 1,) int32, where each run's keys start, and the end.
        most_queries: of a run.
        most_keys: of a run.
    """

    distinct: Tensor | None
    place: Tensor
    keys: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


def _find_runs(visibility: Visibility, B: int, M: int, S: int) -> _Runs:
    positions, first = visibility.positions.expand(B, M), visibility.first.expand(B, M)
    new_row = torch.zeros(B, M, dtype=torch.bool, device=positions.device)
    new_row[:, 0] = True
    step = positions.diff(dim=1, prepend=positions[:, :1])  # (B, M)
    other_segment = first.diff(dim=1, prepend=first[:, :1]) != 0
    new = (new_row | other_segment | (step != 0)).flatten()
    distinct = new.nonzero().flatten()  # (Q,)
    starts = (new_row | other_segment | (step != 1)).flatten()[distinct].nonzero().flatten()  # (R,) among the distinct
    query_starts = torch.cat((starts, starts.new_tensor([len(distinct)])))
    begins, ends = distinct[starts], distinct[query_starts[1:] - 1]  # each run's first and last query
    low = first.flatten()[begins]
    if visibility.window is not None:
        low = torch.maximum(low, positions.flatten()[begins] - visibility.window + 1)
    lengths = positions.flatten()[ends] - low + 1  # (R,)
    key_starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    offsets = torch.arange(int(key_starts[-1]), device=low.device) - key_starts[:-1].repeat_interleave(lengths)
    keys = (begins // M * S + low).repeat_interleave(lengths) + offsets
    in_order = len(keys) == B * S and torch.equal(keys, torch.arange(B * S, device=keys.device))
    return _Runs(
        distinct=None if len(distinct) == B * M else distinct,
        place=new.cumsum(0) - 1,
        keys=None if in_order else keys,
        query_starts=query_starts.int(),
        key_starts=key_starts.int(),
        most_queries=int(query_starts.diff().max()),
        most_keys=int(lengths.max()),
    )
