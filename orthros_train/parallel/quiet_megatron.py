"""megatron-core, imported once and kept quiet; 4 s, so only where the tensor axis has several ranks.

* It warns of optional packages (Transformer Engine, Apex) that it does without: filtered.
* Its products want CUDA to start kernels in the order of the program, so that a gradient's reduction begins before the
  next product; the environment says so unless the user has decided otherwise.
"""

from __future__ import annotations

import os

from orthros_train.parallel.quiet_deepspeed import silenced

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
with silenced():
    from megatron.core import parallel_state
    from megatron.core import tensor_parallel as mcore
    from megatron.core.model_parallel_config import ModelParallelConfig

__all__ = ["ModelParallelConfig", "mcore", "parallel_state"]
