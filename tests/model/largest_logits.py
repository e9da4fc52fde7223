"""What tests ask about the size of logits."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.tiny import SHAPE


class LargestLogits(TorchDispatchMode):
    """Looks at results whose last dim is the tiny models' vocabulary, the head's transposed weight left out.

    Attributes:
        elements: the most of one result.
    """

    def __init__(self, piece_tokens: int) -> None:
        super().__init__()
        self.elements = 0
        self._piece = piece_tokens * SHAPE["vocab_size"]
        self._large: dict[int, torch.Tensor] = {}  # held, or a later result could get the same memory

    @property
    def blocks(self) -> int:
        """How many blocks of memory the results larger than a piece had."""
        return len(self._large)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if not isinstance(tensor, torch.Tensor) or tensor.shape[-1:] != (SHAPE["vocab_size"],):
                continue
            if tensor.shape != (SHAPE["hidden_size"], SHAPE["vocab_size"]):
                self.elements = max(self.elements, tensor.numel())
                if tensor.numel() > self._piece:
                    self._large[tensor.untyped_storage().data_ptr()] = tensor
        return result
