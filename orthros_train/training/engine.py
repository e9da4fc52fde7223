"""One optimizer step on DeepSpeed, exactly weighted by tokens; what both kinds of engine have in common.

* Loss: the sum over the valid labels of the global batch divided by their number N, which all ranks agree on before the
  backward. DeepSpeed averages gradients over the R replicas, so each engine scales its losses by R.
* bf16: weights and activations are bf16; master weights, moments, accumulated and reduced gradients are fp32.
* ZeRO stage 0 is not offered: DeepSpeed clips wrongly there.

plain_engine.py holds every layer on every rank (or its share of the tensor axis) and combines with ZeRO 1, 2 and 3;
pipeline_engine.py holds a stage, with ZeRO-1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from orthros_train.config import Config
from orthros_train.model import OrthrosConfig
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.parallel.mesh import Mesh, ModelParallelUnit
from orthros_train.parallel.quiet_deepspeed import deepspeed, join_process_group, silenced
from orthros_train.training.batches import Batch
from orthros_train.training.manifest import ParameterRecord
from orthros_train.training.optimizer import build_optimizer
from orthros_train.training.ranks import Ranks

OVERLAP_BUCKET = 50_000_000  # gradients summed at once; DeepSpeed's 500,000,000 would hold all of many a model


@dataclass(frozen=True)
class StepResult:
    """What one rank knows after a step."""

    loss: float  # the replica's share: the sum of its label losses / N; the replicas' shares add up to the global loss
    grad_norm: float  # of the global gradient before clipping; not finite if the step was skipped
    applied: bool  # False: weights and moments are untouched


def deepspeed_config(config: Config, accumulation_steps: int) -> dict[str, Any]:
    """DeepSpeed's own configuration of this run."""
    overlap = config.parallel.resolved_overlap_gradients
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.train.micro_batch_size,
        "gradient_accumulation_steps": accumulation_steps,
        "gradient_clipping": config.optimizer.clip_grad_norm or 0.0,
        "zero_optimization": {"stage": config.parallel.zero_stage, "overlap_comm": overlap},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "checkpoint": {"tag_validation": "Ignore"},
        # the boundary tensors whole on each rank of the tensor axis, as the layers on both sides want them
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "steps_per_print": 2**31,
    }
    if overlap:
        settings["zero_optimization"]["reduce_bucket_size"] = OVERLAP_BUCKET
    if config.precision == "bf16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
    return settings


class TrainingEngine(ABC):
    """A model, its optimizer and its gradients, laid over the ranks as `parallel` says.

    Args:
        module: this rank's part of the fp32 model, at its initial values.
        factory: what built its layers.
        config: the run's.
        ranks: all of them.
        mesh: this rank's place among them.
        accumulation_steps: micro-batches of a replica in one optimizer step.
    """

    def __init__(
        self,
        module: nn.Module,
        factory: LayerFactory,
        config: Config,
        ranks: Ranks,
        mesh: Mesh,
        accumulation_steps: int,
    ) -> None:
        self.factory, self.ranks, self.mesh = factory, ranks, mesh
        self.zero_stage = config.parallel.zero_stage
        self.accumulation_steps = accumulation_steps
        named = [(self.canonical_name(name), parameter) for name, parameter in module.named_parameters()]
        self.parameters = {  # noted before ZeRO-3 takes the shapes away
            name: ParameterRecord(factory.full_shape(parameter), factory.split_dim(parameter))
            for name, parameter in named
        }
        optimizer = build_optimizer(named, config.optimizer, ranks.device)
        unit = ModelParallelUnit(mesh) if mesh.tensor_size > 1 and mesh.pipeline_size == 1 else None
        join_process_group()
        with silenced():
            self.deepspeed, *_ = deepspeed.initialize(
                model=module, optimizer=optimizer, config=deepspeed_config(config, accumulation_steps), mpu=unit
            )

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model; under ZeRO-3 its parameters are shards."""
        return self.deepspeed.module

    @property
    def model_config(self) -> OrthrosConfig:
        """The configuration that this rank's part of the model attends by."""
        return self.deepspeed.module.config

    @abstractmethod
    def step(self, micro_batches: Sequence[Batch], valid_labels: int, learning_rate: float) -> StepResult:
        """One update from this replica's micro-batches of a global batch with `valid_labels` > 0 labels."""

    @abstractmethod
    def loss_sum(self, batch: Batch) -> float:
        """This replica's share of the sum of the label losses of one micro-batch a replica, without gradients."""

    def canonical_name(self, name: str) -> str:
        """A parameter's name in OrthrosForCausalLM, given its name in `module`."""
        return name

    def saves(self, name: str, parameter: Tensor) -> bool:
        """Whether this rank saves what it holds of the parameter with this name in `module`: one that the tensor axis
        does not split is saved by its first rank alone."""
        return self.factory.split_dim(parameter) is not None or self.mesh.tensor_rank == 0

    def to_device(self, tensor: Tensor) -> Tensor:
        """The tensor on this rank's device."""
        return tensor.to(self.ranks.device, non_blocking=True)

    def _result(self, loss: float) -> StepResult:
        return StepResult(
            loss=loss,
            grad_norm=float(self.deepspeed.get_global_grad_norm()),
            applied=self.deepspeed.was_step_applied(),
        )
