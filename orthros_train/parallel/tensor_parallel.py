"""Tensor parallelism: the model's layers on megatron-core's column, row and vocabulary-parallel modules.

* Names and layer code stay the model's own; only the factory differs. A parameter that is split says so
  (`tensor_model_parallel`, `partition_dim`), as DeepSpeed's norms and checkpoints expect.
* A replicated parameter that works on split activations (q_norm and k_norm on heads; norms and row biases on the
  token shards of sequence parallelism) gets its gradient summed over the tensor axis at the point of use.
* The vocabulary is padded to a multiple of the axis inside; padding ids have probability zero and no place outside.

Shapes: B batch, N tokens, H query heads, d head size, R ranks of the tensor axis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from orthros_train.config.parallel import check_tensor_size, padded_vocabulary
from orthros_train.model.chunked_loss import TokenLoss
from orthros_train.model.configuration_orthros import OrthrosConfig
from orthros_train.model.layer_factory import IGNORE_INDEX, LayerFactory, RMSNorm
from orthros_train.parallel.device_differences import sequence_parallel_without_cuda
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.quiet_megatron import ModelParallelConfig, mcore
from orthros_train.parallel.sequence_layout import SequenceShards


class ColumnLinear(mcore.ColumnParallelLinear):
    """(B, N, in) -> this rank's (B, N, out/R); under sequence parallelism (N/R, B, in) -> (B, N, out/R)."""

    get_extra_state = nn.Module.get_extra_state  # megatron's placeholder breaks Universal Checkpoint

    def forward(self, x: Tensor) -> Tensor:
        """The bias is added here: megatron's product with a frozen weight has no gradient for it."""
        out, bias = super().forward(x)
        out = out if bias is None else out + bias
        return out.transpose(0, 1) if self.sequence_parallel else out


class RowLinear(mcore.RowParallelLinear):
    """This rank's (B, N, in/R) -> (B, N, out) summed; under sequence parallelism -> (N/R, B, out)."""

    get_extra_state = nn.Module.get_extra_state

    def forward(self, x: Tensor) -> Tensor:
        """The output with the bias added once."""
        if self.sequence_parallel:
            x = x.transpose(0, 1).contiguous()
        out, bias = super().forward(x)
        if bias is None:
            return out
        return out + (mcore.copy_to_tensor_model_parallel_region(bias) if self.sequence_parallel else bias)


class ParallelHead(ColumnLinear):
    """Logits of this rank's part of the padded vocabulary, or the summed loss of all tokens."""

    def __init__(self, width: int, factory: TensorParallelFactory) -> None:
        super().__init__(width, factory.padded_vocab, bias=False, gather_output=False, **factory.common())
        self.factory = factory

    def forward(self, x: Tensor, labels: Tensor | None = None, loss: TokenLoss | None = None) -> Tensor:
        """As the model's `Head`; under sequence parallelism `x` is (M/R, B, D)."""
        return super().forward(x) if labels is None else self.factory.loss_sum(x, self.weight, labels, loss)


class SharedRMSNorm(RMSNorm):
    """A replicated norm on split activations: its weight's gradient is summed over the tensor axis."""

    def forward(self, x: Tensor) -> Tensor:
        """As RMSNorm."""
        return self.normalize(x, mcore.copy_to_tensor_model_parallel_region(self.weight))


class TensorParallelFactory(LayerFactory):
    """Layers of one rank of the tensor axis.

    Args:
        config: the whole model's.
        mesh: its tensor axis, and whether sequences are sharded.

    Raises:
        InputError: heads, KV heads or FFN do not divide by the axis.
    """

    def __init__(self, config: OrthrosConfig, mesh: Mesh) -> None:
        super().__init__(config)
        H, G, _ = config.head_shape
        check_tensor_size(mesh.tensor_size, H, G, config.intermediate_size)
        self.mesh = mesh
        self.padded_vocab = padded_vocabulary(config.vocab_size, mesh.tensor_size)
        self.megatron = ModelParallelConfig(
            tensor_model_parallel_size=mesh.tensor_size,
            sequence_parallel=mesh.sequence_parallel,
            use_cpu_initialization=True,
            perform_initialization=False,
            gradient_accumulation_fusion=False,
        )
        if mesh.sequence_parallel:
            sequence_parallel_without_cuda()
            self.streams = SequenceShards(mesh.tensor_group)

    def column(self, in_features: int, out_features: int, bias: bool = False) -> nn.Module:
        """Output channels split over the axis."""
        linear = ColumnLinear(
            in_features, out_features, bias=bias, gather_output=False, skip_bias_add=True, **self.common()
        )
        return self._split(linear, 0)

    def row(self, in_features: int, out_features: int, bias: bool = False) -> nn.Module:
        """Input channels split over the axis; the bias is whole on every rank."""
        linear = RowLinear(
            in_features, out_features, bias=bias, input_is_parallel=True, skip_bias_add=True, **self.common()
        )
        return self._split(linear, 1)

    def embedding(self, vocab_size: int, width: int) -> nn.Module:
        """Rows of the padded vocabulary split over the axis; the result is whole on every rank."""
        return self._split_vocabulary(mcore.VocabParallelEmbedding(self.padded_vocab, width, **self.common()))

    def head(self, width: int, vocab_size: int) -> nn.Module:
        """Logits of this rank's part of the padded vocabulary."""
        return self._split_vocabulary(ParallelHead(width, self))

    def norm(self, width: int, on: str) -> nn.Module:
        """A norm on heads always works on split activations, one on tokens under sequence parallelism."""
        plain = super().norm(width, on)
        if on == "tokens" and not self.mesh.sequence_parallel:
            return plain
        return SharedRMSNorm(width, self.config.rms_norm_eps)

    def head_vector(self, heads: int, head_dim: int, value: float) -> nn.Parameter:
        """This rank's heads of the vector."""
        parameter = super().head_vector(self.local_heads(heads), head_dim, value)
        return self._mark(parameter, 0)

    def local_heads(self, heads: int) -> int:
        """heads / R."""
        return heads // self.mesh.tensor_size

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The whole parameter's shape, with the vocabulary as it is outside."""
        shape = list(parameter.shape)
        if (dim := self.split_dim(parameter)) is not None:
            shape[dim] *= self.mesh.tensor_size
        if getattr(parameter, "is_vocabulary", False):
            shape[0] = self.config.vocab_size
        return tuple(shape)

    def blank(self, parameter: Tensor, shape: Sequence[int]) -> Tensor:
        """With the parameter's marks."""
        blank: Any = super().blank(parameter, shape)
        if (dim := self.split_dim(parameter)) is not None:
            self._mark(blank, dim).is_vocabulary = getattr(parameter, "is_vocabulary", False)
        return blank

    def slices(self, parameter: Tensor, shape: Sequence[int]) -> tuple[slice, ...]:
        """This rank's share of the split dim, less what of it is padding of the vocabulary."""
        found = [slice(0, size) for size in shape]
        if (dim := self.split_dim(parameter)) is not None:
            start = self.mesh.tensor_rank * self._share(shape[dim])
            found[dim] = slice(min(start, shape[dim]), min(start + self._share(shape[dim]), shape[dim]))
        return tuple(found)

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor; padding rows of the vocabulary are zero."""
        part = whole[self.slices(parameter, whole.shape)]
        dim = self.split_dim(parameter)
        if dim is not None and (missing := self._share(whole.shape[dim]) - part.shape[dim]):
            part = torch.cat((part, whole.new_zeros(missing, *whole.shape[1:])), dim=0)
        return part

    def _share(self, size: int) -> int:
        """What each rank holds of a dim, padding included."""
        return -(-size // self.mesh.tensor_size)

    def split_dim(self, parameter: Tensor) -> int | None:
        """The dim that is split over the tensor axis; None for a replicated parameter."""
        return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]

    def loss_sum(self, hidden: Tensor, weight: Tensor, labels: Tensor, loss: TokenLoss | None = None) -> Tensor:
        """Each rank has its part of the vocabulary and all tokens: gathered once, and their gradients summed once."""
        group = self.mesh.tensor_group
        if self.mesh.sequence_parallel:
            hidden = mcore.gather_from_sequence_parallel_region(hidden, group=group).transpose(0, 1)  # (B, M, D)
        else:
            hidden = mcore.copy_to_tensor_model_parallel_region(hidden, group=group)
        return super().loss_sum(hidden, weight, labels, loss)

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """Gathered over the tensor axis, less the padding."""
        parts = [torch.empty_like(logits) for _ in range(self.mesh.tensor_size)]
        dist.all_gather(parts, logits.contiguous(), group=self.mesh.tensor_group)
        return torch.cat(parts, dim=-1)[..., : self.config.vocab_size]

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token from vocabulary-parallel logits (B, M, padded/R); 0 where ignored."""
        start = self.mesh.tensor_rank * logits.shape[-1]
        padding = max(0, min(logits.shape[-1], start + logits.shape[-1] - self.config.vocab_size))
        wide = logits.float()
        if padding:
            wide = F.pad(wide[..., : logits.shape[-1] - padding], (0, padding), value=torch.finfo(torch.float32).min)
        valid = labels != IGNORE_INDEX
        losses = mcore.vocab_parallel_cross_entropy(wide.contiguous(), torch.where(valid, labels, 0))
        return torch.where(valid, losses, 0.0)

    def common(self) -> dict[str, Any]:
        """What each of megatron-core's layers is given."""
        return {"config": self.megatron, "init_method": nn.init.zeros_, "tp_group": self.mesh.tensor_group}

    def _split(self, module: nn.Module, weight_dim: int) -> nn.Module:
        """Mark the weight as split along `weight_dim`; megatron marks the bias itself."""
        self._mark(module.weight, weight_dim)
        return module

    def _split_vocabulary(self, module: nn.Module) -> nn.Module:
        """Mark the weight as rows of the vocabulary, padding included."""
        self._mark(module.weight, 0).is_vocabulary = True
        return module

    @staticmethod
    def _mark(parameter: Any, dim: int) -> Any:
        parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, 1
        return parameter
