"""Steps on DeepSpeed's plain engine: every layer on every rank, or on every group of the tensor axis; ZeRO 1, 2, 3."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.chunked_loss import TokenLoss
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
        """The sum itself, of cross entropy alone."""
        self.deepspeed.eval()
        return self._loss(self._on_device(batch), 1, None).item()

    def _training_loss(self, batch: Batch, normalizer: int) -> torch.Tensor:
        """A micro-batch's share of the loss that is minimized, a scalar."""
        inputs = self._on_device(batch)
        return self._loss(inputs, normalizer, None if self._teacher is None else self._teacher.token_loss(inputs))

    def _on_device(self, batch: Batch) -> Batch:
        return {key: self.to_device(value) for key, value in batch.items()}

    def _loss(self, inputs: Batch, normalizer: int, token_loss: TokenLoss | None) -> torch.Tensor:
        """The sum of the label losses / normalizer."""
        options = {"num_items_in_batch": normalizer, "use_cache": False, "return_logits": False}
        return self.deepspeed(**inputs, **options, token_loss=token_loss).loss
