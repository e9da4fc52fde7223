"""DeepSpeed, imported once with what it compiles, prints and logs kept out of the way.

* Without a GPU it would build a shared-memory communication extension at start (a minute): it is declared unavailable.
* Whatever the optimizer, it imports its Muon, whose decorators load torch's compiler (seconds): imported here, plain.
* It calls functions that torch has renamed: those warnings are filtered.
* It logs at INFO and prints to stdout while it sets up, loads and converts: its logger is set to errors, and those
  calls run inside `silenced`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Drop what libraries print or warn inside the block; exceptions pass through."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_compiling() -> Iterator[None]:
    """Inside the block, torch.compile, called or used as a decorator, hands functions back as they are."""

    def hand_back(function: object = None, **options: object) -> object:
        return hand_back if function is None else function

    compiler, torch.compile = torch.compile, hand_back  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compiler


if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
with silenced(), _without_compiling():
    import deepspeed
    import deepspeed.ops
    import deepspeed.runtime.zero.muon.muon_optimizer
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from deepspeed.runtime.utils import partition_balanced

deepspeed.utils.logger.setLevel(logging.ERROR)
warnings.filterwarnings("ignore", message=r"`?torch\.distributed\.\w+`? is deprecated", category=FutureWarning)
if not torch.cuda.is_available():
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def join_process_group() -> None:
    """Tell DeepSpeed of torch's process group, once it exists and before anything of DeepSpeed's that communicates."""
    with silenced():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


__all__ = [
    "LayerSpec",
    "PipeModelDataParallelTopology",
    "PipelineModule",
    "TiedLayerSpec",
    "deepspeed",
    "join_process_group",
    "partition_balanced",
    "silenced",
]
