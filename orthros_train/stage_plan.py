"""The pipeline stages of a layout, as the run would build them: layers, and parameters of one rank.

Ranks of a stage are alike, so one of each is enough. Where layers or stages are shared it is really built, on the meta
device in a fake world; the model of a single rank is counted from its configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from .config import Config
from .config_parallel import data_parallel_size
from .model import OrthrosConfig, OrthrosForCausalLM
from .model.parameter_count import parameter_count


@dataclass(frozen=True)
class Stage:
    """One pipeline stage; without pipeline parallelism, the whole model."""

    index: int
    stages: int
    layers: range  # of the model's layers, from 0
    parameters: int  # of one rank; a tied embedding counts on the first and on the last stage
    split: int  # those of them that are a share of a tensor split over parallel.tensor; the others are whole
    megatron: bool  # layers are megatron-core's, which keep views where plain ones keep copies

    @property
    def is_first(self) -> bool:
        """It has the embedding."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """It has the final norm, the head and the loss."""
        return self.index == self.stages - 1

    def micro_batches_in_flight(self, micro_batches: int) -> int:
        """How many of a step's micro-batches wait for their backward at once, one forward and one backward in turn."""
        return min(self.stages - self.index, micro_batches)


def plan_stages(config: Config, model: OrthrosConfig, world_size: int) -> list[Stage]:
    """The stages of `config`'s layout on `world_size` ranks.

    Raises:
        InputError: the world does not factor into the layout.
    """
    parallel = config.parallel
    replicas = data_parallel_size(world_size, parallel.tensor, parallel.pipeline)
    if parallel.tensor * parallel.pipeline == 1:
        return [Stage(0, 1, range(model.num_hidden_layers), parameter_count(model).total, 0, megatron=False)]
    # the first rank of each stage
    return [
        build_stage(config, model, world_size, stage * parallel.tensor * replicas) for stage in range(parallel.pipeline)
    ]


def build_stage(config: Config, model: OrthrosConfig, world_size: int, rank: int) -> Stage:
    """Build what `rank` of `world_size` holds and look at it."""
    from .parallel.fake_rank import fake_rank  # noqa: PLC0415 - imports DeepSpeed
    from .parallel.quiet_deepspeed import silenced  # noqa: PLC0415

    with silenced():
        from .parallel.factory import factory_for  # noqa: PLC0415
        from .parallel.mesh import mesh_of  # noqa: PLC0415
        from .parallel.pipeline import PipelinedModel  # noqa: PLC0415

    parallel, length = config.parallel, config.train.sequence_length
    first, stop = 0, model.num_hidden_layers
    with fake_rank(world_size, rank), silenced():
        mesh = mesh_of(parallel)
        factory = factory_for(model, mesh)
        if parallel.pipeline > 1:
            staged = PipelinedModel(model, factory, mesh, length, config.train.activation_checkpointing)
            entries = staged.parts[mesh.pipeline_rank : mesh.pipeline_rank + 2]  # the embedding is entry 0
            first, stop = max(int(entries[0]) - 1, 0), min(int(entries[1]) - 1, stop)
            module: nn.Module = staged
        else:
            module = OrthrosForCausalLM(model, factory)
        parameters = list(module.parameters())
        split = sum(parameter.numel() for parameter in parameters if factory.split_dim(parameter) is not None)
    return Stage(
        index=mesh.pipeline_rank,
        stages=parallel.pipeline,
        layers=range(first, stop),
        parameters=sum(parameter.numel() for parameter in parameters),
        split=split,
        megatron=parallel.tensor > 1,
    )
