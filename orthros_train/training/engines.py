"""Which model and which engine a layout takes."""

from __future__ import annotations

import torch
from torch import nn

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.pipeline import PipelinedModel, canonical_name
from orthros_train.parallel.quiet_deepspeed import join_process_group, silenced
from orthros_train.training.distillation import Teacher
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.initial_model import InitialValues, build_model
from orthros_train.training.pipeline_engine import PipelineEngine
from orthros_train.training.plain_engine import PlainEngine
from orthros_train.training.ranks import Ranks


def build_module(config: Config, mesh: Mesh, values: InitialValues) -> nn.Module:
    """This rank's part of the fp32 model at step 0: all of it, its share of every layer, or a stage."""
    if mesh.pipeline_size == 1:
        return build_model(values)
    join_process_group()
    train = config.train
    # DeepSpeed prints its topology, and broadcasts tied weights, which torch warns of if autograd sees it
    with silenced(), torch.no_grad():
        model = PipelinedModel(
            values.model_config, values.factory, mesh, train.sequence_length, train.activation_checkpointing
        )
    values.set_all(model, canonical_name)
    return model


def build_engine(
    module: nn.Module,
    config: Config,
    ranks: Ranks,
    mesh: Mesh,
    accumulation_steps: int,
    teacher: Teacher | None = None,
) -> TrainingEngine:
    """The engine of a module of `build_module`; collective. A pipeline has no teacher, as the configuration knows."""
    if isinstance(module, OrthrosForCausalLM):
        return PlainEngine(module, config, ranks, mesh, accumulation_steps, teacher)
    assert isinstance(module, PipelinedModel)
    return PipelineEngine(module, config, ranks, mesh, accumulation_steps)
