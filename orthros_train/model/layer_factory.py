"""Where layers come from: the seam at which tensor parallelism replaces plain PyTorch.

The layers never ask how they are laid over ranks. They take their projections, norms and vectors from a LayerFactory;
this one builds plain modules, the parallel one overrides its methods and keeps every layer's code as it is.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .chunked_loss import TokenLoss, chunked_loss_sum
from .configuration_orthros import OrthrosConfig
from .stream_layout import StreamLayout

IGNORE_INDEX = -100


class RMSNorm(nn.Module):
    """norm(x) = x / sqrt(mean(x²) + eps) ⊙ weight over the last dim, computed in at least float32 (Llama's order)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., width) -> same shape and dtype."""
        return self.normalize(x, self.weight)

    def normalize(self, x: Tensor, weight: Tensor) -> Tensor:
        """The norm with the given weight (width,)."""
        return weight * F.rms_norm(x, (x.shape[-1],), eps=self.eps)  # which computes in at least float32


class Linear(nn.Linear):
    """x Wᵀ + b, reading W once where a processor's library would read it once for each of a few rows.

    A decoding step of one sequence is two rows, x and y. MKL takes a pass over W for each of 2 or 3 rows of x Wᵀ, and
    one for the same product as W xᵀ: 1.5 to 4 times faster (docs/LOG.md). bfloat16 has its own library, without that.
    """

    def forward(self, x: Tensor) -> Tensor:
        """`x` (..., in) -> (..., out)."""
        rows = x.shape[:-1].numel()
        if rows not in (2, 3) or x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
            return super().forward(x)
        product = (self.weight @ x.reshape(rows, -1).contiguous().mT).mT.contiguous()  # (rows, out)
        product = product if self.bias is None else product + self.bias
        return product.view(*x.shape[:-1], -1)


class Head(Linear):
    """The head: logits, or the summed loss of all tokens without ever holding their logits."""

    def __init__(self, width: int, vocab_size: int, factory: "LayerFactory") -> None:
        super().__init__(width, vocab_size, bias=False)
        self.factory = factory

    def forward(self, x: Tensor, labels: Tensor | None = None, loss: TokenLoss | None = None) -> Tensor:
        """`x` (B, M, D) -> logits (B, M, V); with labels (B, M) their summed loss, a scalar."""
        return super().forward(x) if labels is None else self.factory.loss_sum(x, self.weight, labels, loss)


class LayerFactory:
    """Plain PyTorch layers of one model configuration."""

    def __init__(self, config: OrthrosConfig) -> None:
        self.config = config
        self.streams = StreamLayout()

    def column(self, in_features: int, out_features: int, bias: bool = False) -> nn.Module:
        """A linear whose outputs tensor parallelism would split: (…, in) -> (…, out)."""
        return Linear(in_features, out_features, bias=bias)

    def row(self, in_features: int, out_features: int, bias: bool = False) -> nn.Module:
        """A linear whose inputs tensor parallelism would split: (…, in) -> (…, out)."""
        return Linear(in_features, out_features, bias=bias)

    def embedding(self, vocab_size: int, width: int) -> nn.Module:
        """Token ids (B, T) -> vectors (B, T, width)."""
        return nn.Embedding(vocab_size, width)

    def head(self, width: int, vocab_size: int) -> nn.Module:
        """Vectors (B, M, width) -> logits (B, M, vocab_size); called with labels (B, M), too, `loss_sum`."""
        return Head(width, vocab_size, self)

    def norm(self, width: int, on: str) -> nn.Module:
        """RMSNorm over `width` channels of "tokens" (D) or of "heads" (d)."""
        if on not in ("tokens", "heads"):
            raise ValueError(f"a norm works on tokens or on heads, not on {on!r}")
        return RMSNorm(width, self.config.rms_norm_eps)

    def head_vector(self, heads: int, head_dim: int, value: float) -> nn.Parameter:
        """A vector (heads·head_dim,) that starts at `value`; tensor parallelism would split it by heads."""
        return nn.Parameter(torch.full((heads * head_dim,), value))

    def local_heads(self, heads: int) -> int:
        """How many of `heads` this rank computes."""
        return heads

    def full_shape(self, parameter: Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter of which this rank holds `parameter`."""
        return tuple(parameter.shape)

    def split_dim(self, parameter: Tensor) -> int | None:
        """The dim along which ranks hold parts of the parameter; None: every rank holds the whole."""
        return None

    def blank(self, parameter: Tensor, shape: Sequence[int]) -> Tensor:
        """An fp32 tensor to hold this rank's part of the parameter, which has this shape and may be elsewhere now."""
        return torch.empty(tuple(shape))

    def slices(self, parameter: Tensor, shape: Sequence[int]) -> tuple[slice, ...]:
        """Where in the whole parameter, of this shape, this rank's part lies: a slice for each dim."""
        return tuple(slice(0, size) for size in shape)

    def shard(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """This rank's part of the whole tensor of shape `full_shape(parameter)`."""
        return whole

    def reset_parameter(self, name: str, parameter: Tensor, seed: int) -> None:
        """Draw one parameter in place from a generator seeded by (seed, its name in OrthrosForCausalLM).

        Matrices are normal with `initializer_range`, norms and gains 1, biases and shifts 0.
        """
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith((".bias", ".shift")) else 1.0)
            return
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        whole = torch.randn(self.full_shape(parameter), generator=generator)
        parameter.copy_(self.shard(parameter, whole * self.config.initializer_range))

    def loss_sum(self, hidden: Tensor, weight: Tensor, labels: Tensor, loss: TokenLoss | None = None) -> Tensor:
        """The summed loss of a head of this weight (V, D) on `hidden` (B, M, D), in chunks; a scalar.

        A pipeline's last stage calls this with the embedding's weight where that serves as head. The loss is cross
        entropy unless `loss` is another.
        """
        return chunked_loss_sum(hidden, weight, labels, loss or TokenLoss(self.cross_entropy))

    def whole_vocabulary(self, logits: Tensor) -> Tensor:
        """What the head gives (…, this rank's part of the vocabulary) -> (…, vocab), on every rank."""
        return logits

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Loss of each token, in at least float32: logits (B, M, vocab), labels (B, M) -> (B, M); 0 where ignored."""
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        losses = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
        return losses.view_as(labels)
