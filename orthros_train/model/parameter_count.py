"""Exact parameter counts from the configuration alone: nothing is allocated.

Symbols: D width, F FFN width, H query heads, G KV heads, d head size, L layers, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .configuration_orthros import OrthrosConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters by part; a tied head has none of its own."""

    embedding: int
    attention: int  # q, k, v, o with their biases
    query_affines: int
    ffn: int
    norms: int  # of tokens and, with qk_norm, of heads
    head: int

    @property
    def total(self) -> int:
        """The sum of the parts: every parameter once."""
        return sum(getattr(self, field.name) for field in fields(self))


def parameter_count(config: OrthrosConfig) -> ParameterCount:
    """Count the parameters of `OrthrosForCausalLM(config)`.

    attention L·(2·D·H·d + 2·D·G·d) and biases, FFN 3·L·D·F, norms (2·L+1)·D, query affines 2·H·d for each layer's
    output stream and, but for the last layer, its base stream.
    """
    L, D, V = config.num_hidden_layers, config.hidden_size, config.vocab_size
    H, G, d = config.head_shape
    queries, keys = H * d, G * d
    biases = (queries + 2 * keys if config.attention_bias else 0) + (D if config.attention_output_bias else 0)
    affines = (2 * L - 1) * 2 * queries if config.query_affine == "elementwise" else 0
    return ParameterCount(
        embedding=V * D,
        attention=L * (2 * D * queries + 2 * D * keys + biases),
        query_affines=affines,
        ffn=3 * L * D * config.intermediate_size,
        norms=(2 * L + 1) * D + (2 * L * d if config.qk_norm else 0),
        head=0 if config.tie_word_embeddings else V * D,
    )
