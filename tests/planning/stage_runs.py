"""One stage of a layout that really runs, forward and backward, as one rank of a fake world on the CPU.

Shapes, what autograd keeps and what is called are those of a run; values are not, since nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from orthros_train.config import Config, orthros_config
from orthros_train.config.parallel import ParallelSection, data_parallel_size
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.parallel.factory import factory_for
from orthros_train.parallel.fake_rank import fake_rank
from orthros_train.parallel.mesh import build_mesh
from orthros_train.parallel.pipeline import PipelinedModel, pack_layout
from orthros_train.parallel.quiet_deepspeed import silenced

VOCABULARY = 301  # divides by no axis
MODEL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "base_window": 16,
}
TRAIN: dict[str, Any] = {"steps": 1, "micro_batch_size": 2, "global_batch_size": 16, "sequence_length": 96}


def layout_config(precision: str = "fp32", checkpointing: bool = False, **options: Any) -> Config:
    """A small run; options of the sections `parallel` and `model` by name."""
    parallel = {name: options.pop(name) for name in ParallelSection.model_fields if name in options}
    return Config.model_validate(
        {
            "output_dir": "x",
            "precision": precision,
            "model": {**MODEL, **options},
            "train": {**TRAIN, "activation_checkpointing": checkpointing},
            "parallel": parallel,
        }
    )


def small_model(config: Config) -> OrthrosConfig:
    """Its model, with a vocabulary that divides by no axis."""
    return orthros_config(config, VOCABULARY)


class RunningStage:
    """What `rank` of the layout holds, ready to run one micro-batch."""

    def __init__(self, config: Config, world_size: int, stage: int) -> None:
        self.config, self.model = config, small_model(config)
        parallel, self.length = config.parallel, config.train.sequence_length
        self.rows = config.train.micro_batch_size
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        checkpointing = config.train.activation_checkpointing
        mesh = build_mesh(parallel.tensor, parallel.pipeline, parallel.sequence)
        factory = factory_for(self.model, mesh)
        if parallel.pipeline > 1:
            self.module: nn.Module = PipelinedModel(self.model, factory, mesh, self.length, checkpointing)
        else:
            self.module = OrthrosForCausalLM(self.model, factory)
            if checkpointing:
                self.module.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        self.module.to(dtype).train()
        self.stage, self.dtype = stage, dtype

    def inputs(self) -> Any:
        """What the stage would receive."""
        ids = torch.randint(0, self.model.vocab_size, (self.rows, self.length))
        layout = pack_layout(None, None, ids.shape)
        if self.stage == 0:
            return ids, layout
        parallel = self.config.parallel
        tokens = self.length * (2 if self.model.architecture == "orthros" else 1)
        shape = (self.rows, tokens, self.model.hidden_size)
        if parallel.sequence:
            shape = (tokens // parallel.tensor, self.rows, self.model.hidden_size)
        return torch.randn(shape, dtype=self.dtype).requires_grad_(), layout

    def forward(self, inputs: Any) -> Tensor:
        """The residual that the stage would send, or the loss."""
        labels = torch.randint(0, self.model.vocab_size, (self.rows, self.length))
        if self.config.parallel.pipeline == 1:
            options = {"num_items_in_batch": labels.numel(), "use_cache": False, "return_logits": False}
            return self.module(inputs[0], shift_labels=labels, **options).loss
        outputs = self.module(inputs)
        if self.stage < self.config.parallel.pipeline - 1:
            return outputs[0]
        return self.module._loss(outputs, (labels, torch.ones(1)))


@contextmanager
def running_stage(config: Config, world_size: int, stage: int) -> Iterator[RunningStage]:
    """The first rank of `stage`."""
    parallel = config.parallel
    replicas = data_parallel_size(world_size, parallel.tensor, parallel.pipeline)
    with fake_rank(world_size, stage * parallel.tensor * replicas, device="cpu"):
        with silenced():
            running = RunningStage(config, world_size, stage)
        yield running
