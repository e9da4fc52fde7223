"""What megatron-core takes for granted of CUDA and a CPU run has to supply."""

from __future__ import annotations

from typing import Any

import torch


def sequence_parallel_without_cuda() -> None:
    """megatron-core allocates the buffers of sequence parallelism on `torch.cuda.current_device()`; answer "cpu"."""
    if not torch.cuda.is_available():
        cuda: Any = torch.cuda
        cuda.current_device = lambda: torch.device("cpu")
