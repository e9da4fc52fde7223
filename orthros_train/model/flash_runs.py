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

MAX_HEAD_DIM, LEAST_CAPABILITY = 256, (8, 0)  # flash-attn 2's


def flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why flash cannot run here, or None."""
    if device.type != "cuda":
        return f"flash-attn needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash-attn needs bfloat16 or float16, not {dtype}"
    if head_dim > MAX_HEAD_DIM:
        return f"flash-attn has heads of at most {MAX_HEAD_DIM} channels, not {head_dim}"
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        return f"flash-attn needs an Ampere GPU or newer (compute capability 8.0), not {capability[0]}.{capability[1]}"
    return _import_problem()


@cache
def _import_problem() -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    try:
        module = importlib.import_module("flash_attn")
    except (ImportError, OSError) as error:  # built for another torch
        return f"the package flash-attn cannot be imported ({error})"
    if not hasattr(module, "flash_attn_varlen_func"):
        return "the package flash-attn has no flash_attn_varlen_func; install version 2"
    return None


def reads_runs(visibility: Visibility) -> bool:
    """Whether flash-attn has this mask and gains by it.

    Its window has no sinks. And its keys lie token by token, a cache's head by head: a call copies those that it reads,
    which is much for one query a row.
    """
    return visibility.positions.shape[1] > 1 and (visibility.window is None or not visibility.sinks)


def flash(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """(B, H, M, d) over (B, G, S, d) -> (B, H, M, d) through flash_attn_varlen_func."""
    # No import statement: transformers refuses code from the hub whose imports are not installed, wherever they stand.
    varlen_attention = importlib.import_module("flash_attn").flash_attn_varlen_func
    return attend_runs(queries, keys, values, visibility, varlen_attention)


def attend_runs(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, varlen_attention) -> Tensor:  # type: ignore[no-untyped-def]
    """Pack runs, call `varlen_attention` with flash_attn_varlen_func's arguments, unpack."""
    B, H, M, d = queries.shape
    if visibility.contiguous_from is not None:  # one run a row, whose keys are a slice
        low = 0 if visibility.window is None else max(0, visibility.contiguous_from - visibility.window + 1)
        stored = slice(low, visibility.contiguous_from + M)
        keys, values = keys[:, :, stored], values[:, :, stored]
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
    return (out if runs.place is None else out[runs.place]).view(B, M, H, d).transpose(1, 2)


def _chosen(packed: Tensor, which: Tensor | None) -> Tensor:
    """The tokens that a call takes of all (tokens, heads, d), without a copy where it takes all."""
    return packed if which is None else packed.index_select(0, which)


@dataclass(frozen=True)
class _Runs:
    """The packing of one call, the same in every layer.

    Attributes:
        distinct: (Q,), which of the B·M queries are computed; None: all of them.
        place: (B·M,), where among the distinct ones each query is; None as there.
        keys: which of the B·S keys each run reads, one run after the other; None: all of them in order.
        query_starts: (R + 1,) int32, where each run's queries start, and the end.
        key_starts: (R + 1,) int32, where each run's keys start, and the end.
        most_queries: of a run.
        most_keys: of a run.
    """

    distinct: Tensor | None
    place: Tensor | None
    keys: Tensor | None
    query_starts: Tensor
    key_starts: Tensor
    most_queries: int
    most_keys: int


def _find_runs(visibility: Visibility, B: int, M: int, S: int) -> _Runs:
    """Of rows that are one run each without a look at a tensor, of others with one: a GPU waits for every look."""
    device = visibility.positions.device
    if visibility.contiguous_from is not None:
        every = torch.arange(B + 1, dtype=torch.int32, device=device)
        return _Runs(None, None, None, every * M, every * S, M, S)
    positions, first = torch.stack((visibility.positions.expand(B, M), visibility.first.expand(B, M))).cpu()
    new_row = torch.zeros(B, M, dtype=torch.bool)
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
    offsets = torch.arange(int(key_starts[-1])) - key_starts[:-1].repeat_interleave(lengths)
    keys = (begins // M * S + low).repeat_interleave(lengths) + offsets
    all_distinct = len(distinct) == B * M
    in_order = len(keys) == B * S and torch.equal(keys, torch.arange(B * S))
    return _Runs(
        distinct=None if all_distinct else distinct.to(device),
        place=None if all_distinct else (new.cumsum(0) - 1).to(device),
        keys=None if in_order else keys.to(device),
        query_starts=query_starts.int().to(device),
        key_starts=key_starts.int().to(device),
        most_queries=int(query_starts.diff().max()),
        most_keys=int(lengths.max()),
    )
