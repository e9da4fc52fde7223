"""Steps on DeepSpeed's plain engine: every layer on every rank, or on every group of the tensor axis; ZeRO 1, 2, 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.nonfinite import poisoned
from orthros_train.training.batches import Batch
from orthros_train.training.compilation import compile_layers
from orthros_train.training.distillation import Teacher
from orthros_train.training.engine import StepResult, TrainingEngine
from orthros_train.training.optimizer import set_learning_rate
from orthros_train.training.ranks import Ranks


class PlainEngine(TrainingEngine):
    """An OrthrosForCausalLM, replicated over the data axis as far as ZeRO leaves it whole; `teacher` may blend into its
    training loss."""

    def __init__(
        self,
        model: OrthrosForCausalLM,
        config: Config,
        ranks: Ranks,
        mesh: Mesh,
        accumulation_steps: int,
        teacher: Teacher | None = None,
    ) -> None:
        if config.train.activation_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        if config.train.compile:
            compile_layers(model, ranks.device)
        super().__init__(model, model.factory, config, ranks, mesh, accumulation_steps)
        self._teacher = teacher

    def step(self, micro_batches: Sequence[Batch], valid_labels: int, learning_rate: float) -> StepResult:
        """A micro-batch's loss is (its sum / N) · replicas, not divided by the number of micro-batches."""
        set_learning_rate(self.deepspeed.optimizer.param_groups, learning_rate)
        self.deepspeed.train()
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        for batch in micro_batches:
            loss = self._training_loss(batch, valid_labels)
            self.deepspeed.backward(poisoned(loss) * self.mesh.data_size, scale_wrt_gas=False)
            total += loss.detach()
            self.deepspeed.step()
        return self._result(total.item())

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> float:
        """The sum itself."""
        self.deepspeed.eval()
        return self._forward(batch, 1, return_logits=False)[1].loss.item()

    def _training_loss(self, batch: Batch, normalizer: int) -> torch.Tensor:
        """A micro-batch's share of the loss that is minimized, a scalar."""
        inputs, output = self._forward(batch, normalizer, return_logits=self._teacher is not None)
        return output.loss if self._teacher is None else self._teacher.blended_loss(output, inputs, normalizer)

    def _forward(self, batch: Batch, normalizer: int, return_logits: bool) -> tuple[Batch, Any]:
        """A micro-batch on this device, and the model's output, its loss the sum of the label losses / normalizer."""
        inputs = {key: self.to_device(value) for key, value in batch.items()}
        options = {"num_items_in_batch": normalizer, "use_cache": False, "return_logits": return_logits}
        return inputs, self.deepspeed(**inputs, **options)
