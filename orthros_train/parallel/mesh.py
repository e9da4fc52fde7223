"""The mesh of ranks: its axes, their process groups, and which ranks share what.

Axes, fastest first: tensor (splits heads, FFN and vocabulary; under sequence parallelism also the tokens between
them), data (splits the global batch), pipeline (splits the layers). That is megatron-core's default order and the order
of DeepSpeed's PipeModelDataParallelTopology.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from orthros_train.config_parallel import data_parallel_size


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, this rank's place on each, and the groups to communicate in."""

    tensor_size: int
    tensor_rank: int
    tensor_group: dist.ProcessGroup
    data_size: int
    data_rank: int
    data_group: dist.ProcessGroup
    pipeline_size: int
    pipeline_rank: int
    pipeline_group: dist.ProcessGroup
    sequence_parallel: bool


def build_mesh(tensor_size: int = 1, pipeline_size: int = 1, sequence_parallel: bool = False) -> Mesh:
    """Create the process groups of all axes; every rank of the initialized world calls it once.

    Raises:
        InputError: the world does not factor into the axes.
    """
    from megatron.core import parallel_state as state  # noqa: PLC0415 - 4 s of import

    data_parallel_size(dist.get_world_size(), tensor_size, pipeline_size)
    state.initialize_model_parallel(tensor_model_parallel_size=tensor_size, pipeline_model_parallel_size=pipeline_size)
    return Mesh(
        tensor_size=tensor_size,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        tensor_group=state.get_tensor_model_parallel_group(),
        data_size=state.get_data_parallel_world_size(),
        data_rank=state.get_data_parallel_rank(),
        data_group=state.get_data_parallel_group(),
        pipeline_size=pipeline_size,
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        pipeline_group=state.get_pipeline_model_parallel_group(),
        sequence_parallel=sequence_parallel and tensor_size > 1,
    )
