"""Steps on DeepSpeed's plain engine: every layer on every rank, or on every group of the tensor axis; ZeRO 1, 2, 3."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.nonfinite import poisoned
from orthros_train.training.batches import Batch
from orthros_train.training.engine import StepResult, TrainingEngine
from orthros_train.training.optimizer import set_learning_rate
from orthros_train.training.ranks import Ranks


class PlainEngine(TrainingEngine):
    """An OrthrosForCausalLM, replicated over the data axis as far as ZeRO leaves it whole."""

    def __init__(
        self, model: OrthrosForCausalLM, config: Config, ranks: Ranks, mesh: Mesh, accumulation_steps: int
    ) -> None:
        if config.train.activation_checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        super().__init__(model, model.factory, config, ranks, mesh, accumulation_steps)

    def step(self, micro_batches: Sequence[Batch], valid_labels: int, learning_rate: float) -> StepResult:
        """A micro-batch's loss is (its sum / N) · replicas, not divided by the number of micro-batches."""
        set_learning_rate(self.deepspeed.optimizer.param_groups, learning_rate)
        self.deepspeed.train()
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        for batch in micro_batches:
            loss = self._forward(batch, valid_labels)
            self.deepspeed.backward(poisoned(loss) * self.mesh.data_size, scale_wrt_gas=False)
            total += loss.detach()
            self.deepspeed.step()
        return self._result(total.item())

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> float:
        """The sum itself."""
        self.deepspeed.eval()
        return self._forward(batch, 1).item()

    def _forward(self, batch: Batch, normalizer: int) -> torch.Tensor:
        """Sum of a micro-batch's label losses / normalizer, a scalar."""
        inputs = {key: self.to_device(value) for key, value in batch.items()}
        return self.deepspeed(**inputs, num_items_in_batch=normalizer, use_cache=False).loss
