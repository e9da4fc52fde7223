"""Steps on DeepSpeed's pipeline engine: this rank holds a stage; ZeRO-1.

* DeepSpeed averages the losses of micro-batches and replicas, so each carries its scale along: accumulation · replicas
  over the number of valid labels of the global batch.
* A stage may lack some of the optimizer's groups: one that holds the embedding alone has no matrix that decays and no
  affine. DeepSpeed sums the gradient norm over the stages group by group and would wait for ever, so here all groups of
  a stage are summed first.
* Stages receive into buffers of the last shapes, and the number of output tokens differs from step to step and in
  validation: the buffers are dropped before each, on every stage, and the first micro-batch sends the new shapes.
  DeepSpeed would wait for ever otherwise.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from orthros_train.config import Config
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.pipeline import TIED, PipelinedModel, canonical_name, pack_layout
from orthros_train.training.batches import Batch
from orthros_train.training.engine import StepResult, TrainingEngine
from orthros_train.training.optimizer import set_learning_rate
from orthros_train.training.ranks import Ranks


class PipelineEngine(TrainingEngine):
    """The stage of a PipelinedModel that this rank of the pipeline axis holds."""

    def __init__(
        self, model: PipelinedModel, config: Config, ranks: Ranks, mesh: Mesh, accumulation_steps: int
    ) -> None:
        super().__init__(model, model.factory, config, ranks, mesh, accumulation_steps)
        optimizer = self.deepspeed.optimizer
        optimizer.scaled_global_norm = types.MethodType(_global_norm, optimizer)

    def step(self, micro_batches: Sequence[Batch], valid_labels: int, learning_rate: float) -> StepResult:
        """`micro_batches` are looked at on the first and the last stage only."""
        set_learning_rate(self.deepspeed.optimizer.param_groups, learning_rate)
        scale = self.accumulation_steps * self.mesh.data_size / valid_labels
        self.deepspeed.reset_activation_shape()
        loss = self.deepspeed.train_batch(self._packed(micro_batches, scale))
        return self._result(loss.item() / self.mesh.data_size)  # DeepSpeed gives every rank the global loss

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> float:
        """The mean over the replicas of their sums, which is each one's share."""
        self.deepspeed.reset_activation_shape()
        return self.deepspeed.eval_batch(self._packed([batch], 1.0), num_micro_batches=1).item()

    def canonical_name(self, name: str) -> str:
        """Without the prefix of the stage."""
        return canonical_name(name)

    def saves(self, name: str, parameter: torch.Tensor) -> bool:
        """The embedding that serves as head, too, is saved by the first stage alone."""
        second_copy = name.startswith(f"tied_modules.{TIED}.") and self.mesh.pipeline_rank > 0
        return not second_copy and super().saves(name, parameter)

    def _packed(self, micro_batches: Sequence[Batch], scale: float) -> Iterator[Any]:
        """((ids, layout), (labels, scale)) of each micro-batch, as the stages expect them."""
        for batch in micro_batches:
            ids = batch["input_ids"]
            layout = pack_layout(batch.get("document_ids"), batch.get("output_positions"), ids.shape)
            yield (ids, layout), (batch["shift_labels"], torch.tensor([scale]))


def _global_norm(optimizer: Any, norm_type: int = 2) -> torch.Tensor:
    """The L2 norm of the gradients of all stages, with as many sums over ranks on each stage: one."""
    gradients, parameters = [], []
    for index in range(len(optimizer.bit16_groups)):
        mine = [part for part in optimizer.averaged_gradients[index] if not getattr(part, "_zero_padding", False)]
        for gradient, parameter in zip(mine, optimizer.params_in_partition[index], strict=False):
            gradients.append(gradient)
            parameters.append(parameter)
    return optimizer.get_grad_norm_direct(gradients, parameters, norm_type)
