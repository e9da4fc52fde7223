"""The mesh of ranks: its axes and this rank's place on each.

Axes, fastest first: tensor (splits heads, FFN and vocabulary; under sequence parallelism also the tokens between
them), data (splits the global batch), pipeline (splits the layers). That is megatron-core's default order and the order
of DeepSpeed's PipeModelDataParallelTopology. Without a tensor axis the places are arithmetic and megatron-core is not
imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from orthros_train.config.parallel import ParallelSection, data_parallel_size


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, this rank's place on each, and the tensor axis's group (None where it has one rank)."""

    tensor_size: int = 1
    tensor_rank: int = 0
    data_size: int = 1
    data_rank: int = 0
    pipeline_size: int = 1
    pipeline_rank: int = 0
    tensor_group: Any = None
    sequence_parallel: bool = False

    @property
    def speaks(self) -> bool:
        """True on the one rank of each replica that reports what the replica as a whole read and computed."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    @property
    def reads_data(self) -> bool:
        """True where token ids enter or labels are needed: on the first and the last stage."""
        return self.pipeline_rank in (0, self.pipeline_size - 1)


def build_mesh(tensor_size: int = 1, pipeline_size: int = 1, sequence_parallel: bool = False) -> Mesh:
    """This rank's place; every rank of the initialized world calls it once, with the same arguments.

    Raises:
        InputError: the world does not factor into the axes.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replicas = data_parallel_size(world_size, tensor_size, pipeline_size)
    group = None
    if tensor_size > 1:
        from orthros_train.parallel.quiet_megatron import parallel_state  # noqa: PLC0415 - 4 s of import

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_size,
            pipeline_model_parallel_size=pipeline_size,
            create_gloo_process_groups=False,
        )
        group = parallel_state.get_tensor_model_parallel_group()
    return Mesh(
        tensor_size=tensor_size,
        tensor_rank=rank % tensor_size,
        data_size=replicas,
        data_rank=rank // tensor_size % replicas,
        pipeline_size=pipeline_size,
        pipeline_rank=rank // (tensor_size * replicas),
        tensor_group=group,
        sequence_parallel=sequence_parallel and tensor_size > 1,
    )


def mesh_of(parallel: ParallelSection) -> Mesh:
    """`build_mesh` as a configuration says."""
    return build_mesh(parallel.tensor, parallel.pipeline, parallel.sequence)


class ModelParallelUnit:
    """The tensor and data axes under the names that DeepSpeed's plain engine asks its `mpu` for."""

    def __init__(self, mesh: Mesh) -> None:
        from orthros_train.parallel.quiet_megatron import parallel_state as state  # noqa: PLC0415 - 4 s of import

        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = lambda: mesh.tensor_rank
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = lambda: mesh.tensor_size
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: mesh.tensor_group
        self.get_data_parallel_rank = lambda: mesh.data_rank
        self.get_data_parallel_world_size = lambda: mesh.data_size
        self.get_data_parallel_group = state.get_data_parallel_group
        self.get_pipeline_model_parallel_rank = lambda: 0
        self.get_pipeline_model_parallel_world_size = lambda: 1
        self.get_pipeline_model_parallel_group = state.get_pipeline_model_parallel_group
