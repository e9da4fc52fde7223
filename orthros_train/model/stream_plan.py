"""Where each token of a call stands: positions, segments, rotations and visibility, computed once for all layers.

Inside the model rows are left-aligned: row b's real tokens are columns 0..counts[b]-1 and are stored at
lengths[b]..lengths[b]+counts[b]-1. A padding column is computed as a repeat of the row's last real token, which keeps
every number finite, and nothing reads it.

Shapes: B batch, T base tokens, M output tokens, d head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .configuration_orthros import OrthrosConfig
from .kv_cache import KVCache
from .rope import RotaryEmbedding
from .stream_layout import OutputColumns, take_tokens
from .visibility import Visibility


@dataclass(frozen=True)
class QueryPlan:
    """What one stream's queries need: cos and sin, each (B or 1, N, 1, d), and the keys that they see."""

    rope: tuple[Tensor, Tensor]
    visibility: Visibility


@dataclass(frozen=True)
class StreamPlan:
    """One call's layout, the same in every layer."""

    base_tokens: int
    output_columns: OutputColumns
    base: QueryPlan
    output: QueryPlan
    kernel: str


def segment_starts(document_ids: Tensor) -> Tensor:
    """Column at which each column's segment starts: (B, T) -> (B, T) int64. A segment ends where the id changes."""
    columns = torch.arange(document_ids.shape[1], device=document_ids.device)
    changes = torch.zeros_like(document_ids, dtype=torch.bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return torch.where(changes, columns, 0).cummax(dim=1).values


def plan_streams(
    config: OrthrosConfig,
    rope: RotaryEmbedding,
    kernel: str,
    batch_size: int,
    base_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    output_columns: OutputColumns = None,
    counts: Tensor | None = None,
    document_ids: Tensor | None = None,
    position_ids: Tensor | None = None,
    cache: KVCache | None = None,
) -> StreamPlan:
    """Lay out a call of `batch_size` B left-aligned rows with `base_tokens` T columns.

    Args:
        config: architecture, window and sinks.
        rope: the model's.
        kernel: attention kernel of the call.
        dtype: the residual's, of the rotations.
        device: where the plan's tensors live.
        output_columns: which columns get an output token.
        counts: (B,) real tokens of each row; None: all T.
        document_ids: (B, T) segments; only without a cache.
        position_ids: (B, T) RoPE positions instead of those counted within the segment.
        cache: holds what came before; None: nothing.
    """
    B, T = batch_size, base_tokens
    positions, columns, past = _storage_positions(B, T, device, counts, cache)
    first, contiguous = torch.zeros_like(positions), past
    if document_ids is not None:
        first = segment_starts(document_ids).gather(1, columns.expand(B, T))  # (B, T)
        positions, contiguous = positions.expand(B, T), None
    angles = positions - first if position_ids is None else position_ids

    parts: tuple[Tensor, ...] = (positions, first, angles)
    if isinstance(output_columns, Tensor):
        parts, output_from = tuple(each.expand(B, T) for each in parts), None
    else:
        output_from = None if contiguous is None else contiguous + T - (T if output_columns is None else output_columns)
    output_positions, output_first, output_angles = (take_tokens(each, output_columns) for each in parts)
    if isinstance(output_columns, Tensor):
        output_first = torch.where(output_columns < 0, output_positions, output_first)  # an unused slot reads one key
    window, sinks = config.base_window, config.base_sinks
    output_window = None if config.architecture == "orthros" else window
    return StreamPlan(
        base_tokens=T,
        output_columns=output_columns,
        base=QueryPlan(rope(angles, dtype), Visibility(positions, first, window, sinks, contiguous)),
        output=QueryPlan(
            rope(output_angles, dtype),
            Visibility(output_positions, output_first, output_window, sinks, output_from),
        ),
        kernel=kernel,
    )


def _storage_positions(
    B: int, T: int, device: torch.device, counts: Tensor | None, cache: KVCache | None
) -> tuple[Tensor, Tensor, int | None]:
    """Where the call's columns are stored, which column each repeats, and the storage index of column 0.

    Positions and columns are (1, T) where all rows are alike, else (B, T); the index is None where rows differ.
    """
    columns = torch.arange(T, device=device)[None]
    past = cache.uniform_length if cache is not None else 0
    if counts is None and past is not None:
        return columns + past, columns, past
    lengths = columns.new_zeros(B) if cache is None or cache.lengths is None else cache.lengths
    if counts is not None:
        columns = torch.minimum(columns, counts[:, None] - 1)  # -1 in a row without tokens
    return (lengths[:, None] + columns).clamp(min=0), columns.clamp(min=0), None
