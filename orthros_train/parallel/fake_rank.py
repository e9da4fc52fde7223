"""Any rank of a large world on one machine: groups are torch's fake ones, whose collectives return at once.

On the meta device nothing is allocated, so a stage of any size is built as it is in a run, in a fraction of a second.
On the CPU a stage really runs: its shapes, memory and calls are true, its values are not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist

from orthros_train.parallel.quiet_deepspeed import deepspeed, silenced


@contextlib.contextmanager
def fake_rank(world_size: int, rank: int, device: str = "meta") -> Iterator[None]:
    """Inside the block this process is `rank` of `world_size`, and modules are built on `device` ("meta" or "cpu").

    The process must not have joined a process group, and has left this one after the block.
    """
    with silenced():
        from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: PLC0415 - registers the backend

        from orthros_train.parallel.quiet_megatron import parallel_state  # noqa: PLC0415 - 4 s of import

    accelerator = deepspeed.accelerator.get_accelerator()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with (
            mock.patch.dict(os.environ, {"LOCAL_RANK": "0"}),
            mock.patch.object(accelerator, "device_name", return_value=device),  # where a stage moves itself
            torch.device(device),
        ):
            with silenced():
                deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        deepspeed.comm.comm.cdb = None
