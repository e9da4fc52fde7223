"""The section `parallel`, and which layouts are possible.

Each rule stands here once, without torch: the configuration's check and `--dry-run` apply it to the options, the
parallel layers to what they are built from. A rule's message names the options and what to set instead.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from ..errors import InputError
from .section import Section


class LayoutError(InputError, ValueError):
    """An impossible layout; a ValueError, too, so that a check of the configuration may raise it."""


class ParallelSection(Section):
    """How the model and its state are laid over ranks: tensor x pipeline ranks hold a replica, the rest are data."""

    tensor: int = Field(default=1, ge=1)  # ranks that share every layer: heads, FFN and vocabulary
    sequence: bool = False  # those ranks share the tokens between the products, too
    pipeline: int = Field(default=1, ge=1)  # stages that share the layers
    zero_stage: Literal[1, 2, 3] = 1
    # gradients are summed over replicas while the backward pass goes on; None: under ZeRO-3 (docs/parallelism.md)
    overlap_gradients: bool | None = None
    timeout_seconds: float = Field(default=1800.0, gt=0, le=1e9)  # of a collective
    # without a step for so long, every rank prints its stack; None: half of timeout_seconds
    watchdog_seconds: float | None = Field(default=None, gt=0, le=1e9)

    @property
    def resolved_overlap_gradients(self) -> bool:
        """Whether communication of gradients overlaps the backward pass."""
        return self.zero_stage == 3 if self.overlap_gradients is None else self.overlap_gradients

    @property
    def resolved_watchdog_seconds(self) -> float:
        """Seconds without a step after which every rank prints its stack."""
        return self.watchdog_seconds if self.watchdog_seconds is not None else self.timeout_seconds / 2

    @field_validator("zero_stage", mode="before")
    @classmethod
    def _check_zero_stage(cls, stage: object) -> object:
        if isinstance(stage, bool | float):  # both equal 1 to Python
            raise ValueError(f"parallel.zero_stage must be 1, 2 or 3, but is {str(stage).lower()}")
        return stage

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.sequence and self.tensor == 1:
            raise LayoutError(
                "parallel.sequence shares tokens among the ranks of parallel.tensor, which is 1: set parallel.tensor "
                "to 2 or more, or parallel.sequence: false"
            )
        if self.zero_stage > 1 and self.pipeline > 1:
            raise LayoutError(
                f"parallel.zero_stage={self.zero_stage} does not combine with parallel.pipeline={self.pipeline}: "
                "DeepSpeed's pipeline keeps whole gradients until the step; set parallel.zero_stage: 1, or "
                "parallel.pipeline: 1 (parallel.tensor saves memory under every ZeRO stage)"
            )
        if self.overlap_gradients and self.zero_stage == 1:
            raise LayoutError(
                "parallel.overlap_gradients does not combine with parallel.zero_stage=1, which sums gradients once a "
                "step, after the last backward pass: set parallel.overlap_gradients: false, or parallel.zero_stage: 2"
            )
        return self


def check_tensor_size(tensor: int, heads: int, kv_heads: int, intermediate_size: int) -> None:
    """Every rank of the tensor axis computes as many query heads, KV heads and FFN channels as the others.

    Raises:
        LayoutError: one of them does not divide.
    """
    for name, size in (
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("intermediate_size", intermediate_size),
    ):
        if size % tensor:
            common = math.gcd(heads, kv_heads, intermediate_size)
            possible = [str(divisor) for divisor in range(1, min(common, 64) + 1) if common % divisor == 0]
            raise LayoutError(
                f"model.{name}={size} does not divide by parallel.tensor={tensor}; set parallel.tensor to a common "
                f"divisor of heads, KV heads and model.intermediate_size ({', '.join(possible)}), or change "
                f"model.{name}"
            )


def check_pipeline_size(pipeline: int, layers: int) -> None:
    """Every stage holds a layer.

    Raises:
        LayoutError: there are more stages than layers.
    """
    if pipeline > layers:
        raise LayoutError(
            f"parallel.pipeline={pipeline} is more stages than model.num_hidden_layers={layers} can fill; "
            f"set parallel.pipeline to {layers} or less"
        )


def check_sequence_shards(tensor: int, sequence_length: int, output_multiple: int | None) -> None:
    """Under sequence parallelism every rank of the tensor axis holds as many tokens of each stream as the others.

    Args:
        tensor: ranks of the axis.
        sequence_length: base tokens of a row.
        output_multiple: what the number of output tokens of a row is a multiple of; None: a token at every position.

    Raises:
        LayoutError: one of them does not divide.
    """
    for name, size in (("train.sequence_length", sequence_length), ("data.output_positions_multiple", output_multiple)):
        if size is not None and size % tensor:
            raise LayoutError(
                f"{name}={size} does not divide by parallel.tensor={tensor}, as parallel.sequence needs; set {name} "
                f"to a multiple of {tensor} (the next is {-(-size // tensor) * tensor}), or parallel.sequence: false"
            )


def data_parallel_size(world_size: int, tensor: int, pipeline: int) -> int:
    """How many replicas of the model, each with its own share of the global batch, `world_size` ranks are.

    Raises:
        LayoutError: the world does not factor into the axes.
    """
    replica = tensor * pipeline
    if world_size % replica:
        ranks = f"{world_size} rank{'s do' if world_size > 1 else ' does'}"
        raise LayoutError(
            f"{ranks} not factor into parallel.tensor={tensor} x parallel.pipeline={pipeline}; "
            f"start a multiple of {replica} ranks or lower one of them"
        )
    return world_size // replica


def padded_vocabulary(vocabulary: int, tensor: int) -> int:
    """The vocabulary as the ranks of the tensor axis hold it together: the next multiple of them."""
    return -(-vocabulary // tensor) * tensor
