"""Sequence parallelism: between the products, each rank of the tensor axis holds its share of both streams.

Rank r of R holds the residual [X_r; Y_r], sequence first: (T/R + M/R, B, D). A column linear gathers along the first
dim, so what it makes is [X_0; Y_0; X_1; Y_1; …] of whole tokens; attention takes the streams apart, each in order, and
puts them back together for the row linear, whose reduce-scatter gives each rank its own tokens again. Dropping X in the
last layer is a local slice.

Shapes: B batch, T base tokens, M output tokens, R ranks of the tensor axis, D width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from orthros_train.model.stream_layout import OutputColumns, StreamLayout, take_tokens
from orthros_train.parallel.quiet_megatron import mcore


class SequenceShards(StreamLayout):
    """The residual sharded by tokens over the tensor axis; T and M are multiples of its size."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)

    def join(self, base: Tensor, output: Tensor | None) -> Tensor:
        """X (B, T, D) and Y (B, M, D), the same on all ranks -> [X_r; Y_r] (T/R + M/R, B, D)."""
        parts = [self._scatter(stream) for stream in (base, output) if stream is not None]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=0)

    def split(self, residual: Tensor, base_tokens: int) -> tuple[Tensor, Tensor]:
        """[X_r; Y_r] -> X_r and Y_r, sequence first."""
        share = base_tokens // self.ranks
        return residual[:share], residual[share:]

    def pick(self, base: Tensor, columns: OutputColumns) -> Tensor:
        """X_r -> this rank's share of the tokens at the output columns, sequence first."""
        if columns is None:
            return base
        whole = mcore.gather_from_sequence_parallel_region(base, tensor_parallel_output_grad=False, group=self.group)
        return self._scatter(take_tokens(whole.transpose(0, 1), columns))

    def split_projected(self, projected: Tensor, base_tokens: int) -> tuple[Tensor, Tensor]:
        """(B, T+M, …) in the order [X_0; Y_0; X_1; …] -> X (B, T, …) and Y (B, M, …)."""
        shards = projected.unflatten(1, (self.ranks, -1))  # (B, R, T/R + M/R, …)
        share = base_tokens // self.ranks
        return shards[:, :, :share].flatten(1, 2), shards[:, :, share:].flatten(1, 2)

    def join_projected(self, base: Tensor, output: Tensor) -> Tensor:
        """X (B, T, …) and Y (B, M, …) -> (B, T+M, …) in the order [X_0; Y_0; X_1; …]."""
        shards = (base.unflatten(1, (self.ranks, -1)), output.unflatten(1, (self.ranks, -1)))
        return torch.cat(shards, dim=2).flatten(1, 2)

    def _scatter(self, stream: Tensor) -> Tensor:
        """(B, N, D), the same on all ranks -> this rank's (N/R, B, D)."""
        if stream.shape[1] % self.ranks:
            raise ValueError(
                f"{stream.shape[1]} tokens do not divide over {self.ranks} ranks; under parallel.sequence both the "
                "sequence length and the number of output tokens are multiples of parallel.tensor. Build the model "
                "for prefill and decoding, which take one token, with parallel.sequence: false: weights are the same"
            )
        return mcore.scatter_to_sequence_parallel_region(stream.transpose(0, 1).contiguous(), group=self.group)
