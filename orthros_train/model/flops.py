"""Exact FLOPs of the model, in closed form: what a step costs, not an estimate.

* A multiply-add is 2 FLOPs. Counted are the matrix products: projections, FFN, head, and attention's two products
  (Q·Kᵀ and P·V) over exactly the visible pairs. Embeddings, norms, RoPE, query affines and softmax count 0.
* Work that is not done is not counted: Orthros' last layer computes only K and V for the base stream, the transformer
  arm's last layer computes queries, attention, o and FFN only where logits are asked for.
* No recomputation is counted, neither of activation checkpointing nor of a fused attention backward.
* Everything is a sum over tokens and pairs, so counts of rows add up: the segments of a whole batch may be passed as if
  they were one row.

Symbols: T base tokens, M output tokens, D width, F FFN width, H query heads, G KV heads, d head size, L layers,
V vocabulary, w window, s sinks, i the offset of a token in its segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .parameter_count import parameter_count

if TYPE_CHECKING:
    from .configuration_orthros import OrthrosConfig

FLOPS_PER_MULTIPLY_ADD = 2
TRAINING_PER_FORWARD = 3  # backward computes two products, by input and by weight, for each of forward's


@dataclass(frozen=True)
class Flops:
    """FLOPs by part. In the transformer arm all attention is base attention."""

    projections: int  # q, k, v, o of both streams
    base_attention: int
    output_attention: int
    ffn: int
    head: int

    @property
    def total(self) -> int:
        """The sum of the parts."""
        return sum(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def __mul__(self, factor: int) -> Flops:
        return Flops(*(getattr(self, field.name) * factor for field in fields(self)))

    __rmul__ = __mul__


def forward_flops(
    config: OrthrosConfig, segment_lengths: Sequence[int], output_positions: Sequence[int] | None = None
) -> Flops:
    """One forward over a row that is the concatenation of segments, without a cache.

    Orthros, multiply-adds: projections 2·T·D·G·d·L + 2·D·H·d·(T·(L-1) + M·L), FFN 3·D·F·(T·(L-1) + M·L), head M·D·V,
    attention 2·H·d per visible pair: base Σ visible(i) in L-1 layers, output Σ (i+1) over output tokens in L layers.
    Transformer: projections 2·T·D·G·d·L + 2·D·H·d·(T·(L-1) + M), FFN 3·D·F·(T·(L-1) + M), head M·D·V, attention
    2·H·d·visible(i) for every token in L-1 layers and for the M output tokens in the last.

    Args:
        config: the model's.
        segment_lengths: tokens of each segment, in order; their sum is T.
        output_positions: the columns in [0, T) whose logits are asked for, None for all (M = T).

    Raises:
        ValueError: a negative length, or an output position outside the row.
    """
    lengths = np.asarray(segment_lengths, dtype=np.int64)
    if (lengths < 0).any():
        raise ValueError(f"segment lengths must not be negative, got {int(lengths.min())}")
    offsets = None if output_positions is None else _offsets(lengths, output_positions)
    base_pairs = _segment_pairs(lengths, config.base_window, config.base_sinks)
    if config.architecture == "transformer":
        last_pairs = base_pairs if offsets is None else _visible(offsets, config.base_window, config.base_sinks)
        output_pairs = 0
    else:
        last_pairs = 0
        output_pairs = _segment_pairs(lengths, None, 0) if offsets is None else _visible(offsets, None, 0)
    base_tokens = int(lengths.sum())
    output_tokens = base_tokens if offsets is None else len(offsets)
    return _assemble(
        config, base_tokens, output_tokens, base_pairs=base_pairs, last_pairs=last_pairs, output_pairs=output_pairs
    )


def training_flops(
    config: OrthrosConfig, segment_lengths: Sequence[int], output_positions: Sequence[int] | None = None
) -> Flops:
    """Forward and backward: 3 × `forward_flops`, since every product has two in the backward pass."""
    return TRAINING_PER_FORWARD * forward_flops(config, segment_lengths, output_positions)


def prefill_flops(config: OrthrosConfig, length: int) -> Flops:
    """Prefill of a prompt of `length` >= 1 tokens: logits at its last position alone. Chunking does not change it."""
    return forward_flops(config, [length], [length - 1])


def decode_flops(config: OrthrosConfig, context_length: int) -> Flops:
    """One decoding step of one row after `context_length` cached tokens; the new token attends to itself, too."""
    offset = np.asarray([context_length], dtype=np.int64)
    base_pairs = _visible(offset, config.base_window, config.base_sinks)
    if config.architecture == "transformer":
        return _assemble(config, 1, 1, base_pairs=base_pairs, last_pairs=base_pairs, output_pairs=0)
    return _assemble(config, 1, 1, base_pairs=base_pairs, last_pairs=0, output_pairs=_visible(offset, None, 0))


def palm_flops_per_token(config: OrthrosConfig, sequence_length: int) -> int:
    """Training FLOPs per base token by PaLM's convention (Chowdhery et al. 2022, appendix B): 6·N + 12·L·H·d·T.

    N counts every parameter once, embeddings included. The convention ignores causality, windows and the second
    stream: it makes runs comparable with published ones, it does not say what was executed.
    """
    H, _, d = config.head_shape
    attention = 12 * config.num_hidden_layers * H * d * sequence_length
    return 6 * parameter_count(config).total + attention


def _assemble(
    config: OrthrosConfig, base_tokens: int, output_tokens: int, *, base_pairs: int, last_pairs: int, output_pairs: int
) -> Flops:
    """Weigh tokens and visible pairs by the sizes of the model.

    `base_pairs` count in layers 1..L-1, `last_pairs` in the base stream of layer L, `output_pairs` in all L layers.
    """
    L, D, F = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    H, G, d = config.head_shape
    output_layers = L if config.architecture == "orthros" else 1
    queried = base_tokens * (L - 1) + output_tokens * output_layers  # tokens that pass through q, o and FFN
    per_pair = 2 * H * d  # Q·K and P·V
    return FLOPS_PER_MULTIPLY_ADD * Flops(
        projections=2 * D * G * d * base_tokens * L + 2 * D * H * d * queried,
        base_attention=per_pair * (base_pairs * (L - 1) + last_pairs),
        output_attention=per_pair * output_pairs * L,
        ffn=3 * D * F * queried,
        head=output_tokens * D * config.vocab_size,
    )


def _visible(offsets: NDArray[np.int64], window: int | None, sinks: int) -> int:
    """Σ over tokens of |{j : 0 <= j <= i and (j > i-w or j < s)}| = min(i+1, w) + min(s, max(0, i+1-w))."""
    if window is None:
        return int((offsets + 1).sum())
    return int((np.minimum(offsets + 1, window) + np.clip(offsets + 1 - window, 0, sinks)).sum())


def _segment_pairs(lengths: NDArray[np.int64], window: int | None, sinks: int) -> int:
    """Σ over segments of Σ_{i<n} visible(i): a ramp up to w, and a second one up to s once the window has moved on."""
    if window is None:
        return int(_ramp(lengths, lengths).sum())
    return int((_ramp(lengths, window) + _ramp(np.maximum(lengths - window, 0), sinks)).sum())


def _ramp(n: NDArray[np.int64], top: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Σ_{k=1..n} min(k, top)."""
    rising = np.minimum(n, top)
    return rising * (rising + 1) // 2 + (n - rising) * top


def _offsets(lengths: NDArray[np.int64], output_positions: Sequence[int]) -> NDArray[np.int64]:
    """Each output position's offset in its segment."""
    positions = np.asarray(output_positions, dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if len(positions) and (positions.min() < 0 or positions.max() >= total):
        raise ValueError(f"output positions must lie in [0, {total}), got {positions.min()} to {positions.max()}")
    segment = np.searchsorted(ends, positions, side="right")
    return positions - (ends - lengths)[segment]
