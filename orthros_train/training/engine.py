"""One optimizer step on DeepSpeed's plain engine, exactly weighted by tokens.

* Loss: the sum over the valid labels of the global batch divided by their number N, which all ranks agree on before the
  backward. DeepSpeed averages gradients over the R ranks, so a micro-batch's loss is (its sum / N) · R, and it is not
  divided by the number of micro-batches.
* Non-finite: the loss is multiplied by 1, or by NaN where it is not finite. A bad loss so becomes a bad gradient,
  reaches all ranks in the reduction, and the one check that ZeRO makes before it touches weights or moments (is the
  global gradient norm finite?) decides for all ranks together.
* bf16: weights and activations are bf16; master weights, moments, accumulated and reduced gradients are fp32.
* ZeRO stage 0 is not offered: DeepSpeed clips wrongly there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from orthros_train.config import Config
from orthros_train.model import OrthrosConfig
from orthros_train.parallel.quiet_deepspeed import CheckpointEngine, deepspeed, silenced
from orthros_train.training.batches import Batch
from orthros_train.training.distillation import Teacher
from orthros_train.training.optimizer import build_optimizer, set_learning_rate
from orthros_train.training.ranks import Ranks

# What DeepSpeed's converter to a universal checkpoint wants to know; nothing is sliced over tensor-parallel ranks.
UNIVERSAL_CHECKPOINT_INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [".*"],
}


@dataclass(frozen=True)
class StepResult:
    """What one rank knows after a step."""

    loss: float  # this rank's share: the sum of its label losses / N; shares add up to the global loss
    grad_norm: float  # of the global gradient before clipping; not finite if the step was skipped
    applied: bool  # False: weights and moments are untouched


def deepspeed_config(config: Config, accumulation_steps: int) -> dict[str, Any]:
    """DeepSpeed's own configuration of this run."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": config.optimizer.clip_grad_norm or 0.0,
        "zero_optimization": {"stage": config.parallel.zero_stage},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "checkpoint": {"tag_validation": "Ignore"},
    }
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return settings


class TrainingEngine:
    """A model, its optimizer and its gradients, sharded over the ranks as `parallel.zero_stage` says."""

    def __init__(self, model: PreTrainedModel, config: Config, ranks: Ranks, accumulation_steps: int) -> None:
        if config.train.activation_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.universal_checkpoint_info = UNIVERSAL_CHECKPOINT_INFO  # type: ignore[assignment]
        self.ranks = ranks
        self.zero_stage = config.parallel.zero_stage
        self.teacher: Teacher | None = None
        optimizer = build_optimizer(model, config.optimizer, ranks.device)
        with silenced():
            deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
            self.deepspeed, *_ = deepspeed.initialize(
                model=model, optimizer=optimizer, config=deepspeed_config(config, accumulation_steps)
            )

    @property
    def module(self) -> nn.Module:
        """The model itself; under ZeRO-3 its parameters are shards."""
        return self.deepspeed.module

    @property
    def model_config(self) -> OrthrosConfig:
        """The configuration that the model attends by."""
        return self.deepspeed.module.config

    def step(self, micro_batches: Sequence[Batch], valid_labels: int, learning_rate: float) -> StepResult:
        """One update from this rank's micro-batches of a global batch with `valid_labels` > 0 labels."""
        set_learning_rate(self.deepspeed.optimizer.param_groups, learning_rate)
        self.deepspeed.train()
        total = torch.zeros((), dtype=torch.float32, device=self.ranks.device)
        for batch in micro_batches:
            loss = self._training_loss(batch, valid_labels)
            poison = torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
            self.deepspeed.backward(loss * poison * self.ranks.world_size, scale_wrt_gas=False)
            total += loss.detach()
            self.deepspeed.step()
        return StepResult(
            loss=total.item(),
            grad_norm=float(self.deepspeed.get_global_grad_norm()),
            applied=self.deepspeed.was_step_applied(),
        )

    def _training_loss(self, batch: Batch, normalizer: int) -> torch.Tensor:
        """A micro-batch's share of the loss that is minimized, a scalar."""
        inputs, output = self._forward(batch, normalizer)
        return output.loss if self.teacher is None else self.teacher.blended_loss(output, inputs, normalizer)

    def _forward(self, batch: Batch, normalizer: int) -> tuple[Batch, Any]:
        """The batch on this device, and the model's output with the sum of its label losses / normalizer."""
        inputs = {key: value.to(self.ranks.device, non_blocking=True) for key, value in batch.items()}
        return inputs, self.deepspeed(**inputs, num_items_in_batch=normalizer, use_cache=False)

    @torch.no_grad()
    def loss_sum(self, batch: Batch) -> float:
        """Sum of a micro-batch's label losses, without gradients."""
        self.deepspeed.eval()
        return self._forward(batch, 1)[1].loss.item()

    def state_files(self) -> list[tuple[str, Any]]:
        """(file name, state) of every file that this rank contributes to a checkpoint; collective, touches no disk.

        The states alias live tensors: write them before the next step.
        """
        collector = _StateCollector()
        original, self.deepspeed.checkpoint_engine = self.deepspeed.checkpoint_engine, collector
        # DeepSpeed also copies its own recovery script beside the checkpoint; export_hf does that job here.
        self.deepspeed._copy_recovery_script = lambda save_path: None
        try:
            with silenced():
                self.deepspeed.save_checkpoint(".", tag="state", save_latest=False)
        finally:
            self.deepspeed.checkpoint_engine = original
        return collector.files

    def load_native(self, folder: str, tag: str) -> None:
        """Continue from a checkpoint of this very layout, bitwise."""
        with silenced():
            path, _ = self.deepspeed.load_checkpoint(folder, tag=tag)
        if path is None:
            raise RuntimeError(f"DeepSpeed found no state in {folder}/{tag}")


class _StateCollector(CheckpointEngine):
    """Takes the states that DeepSpeed would write, so that they can be written, hashed and synced on our terms."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, Any]] = []

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing to create."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep the state under its file name."""
        self.files.append((Path(path).name, state_dict))

    def load(self, path: str, map_location: Any = None) -> Any:
        """Never called: loading goes through DeepSpeed's own engine."""
        raise NotImplementedError(path)

    def commit(self, info: Any) -> bool:
        """Nothing is pending."""
        return True
