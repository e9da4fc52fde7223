"""Planned bytes of weights, gradients and optimizer equal those of the tensors that real engines hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from deepspeed.runtime.pipe.schedule import BackwardPass

from orthros_train.config import Config
from orthros_train.planning.memory_estimate import memory_parts
from orthros_train.planning.stage_plan import plan_stages
from orthros_train.training.engine import TrainingEngine
from tests.distributed import run_distributed
from tests.parallel.test_layouts import build, model_config, run_config, take_steps

MODEL = "plain"  # each group of its optimizer divides by all replicas here, so DeepSpeed adds no padding
PARTS = ("weights", "gradients", "master weights", "Adam moments")
# where DeepSpeed's optimizers keep the gradients that wait for the step, and this rank's fp32 weights
GRADIENTS = ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat", "grad_partitions_flat_buffer")
MASTERS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-1 on 2": (2, {"zero_stage": 1}),
    "ZeRO-2 on 2": (2, {"zero_stage": 2}),
    "ZeRO-3 on 2": (2, {"zero_stage": 3}),
    "TP2": (2, {"tensor": 2}),
    "PP2": (2, {"pipeline": 2}),
    "ZeRO-1 on 4": (4, {"zero_stage": 1}),
    "ZeRO-2 on 4": (4, {"zero_stage": 2}),
    "ZeRO-3 on 4": (4, {"zero_stage": 3}),
    "TP2·ZeRO-3 on 4": (4, {"tensor": 2, "zero_stage": 3}),
    "PP2·DP2": (4, {"pipeline": 2}),
}


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in lists and dictionaries of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors(item)


def storages(found: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes of each distinct storage, by its address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}


def held(engine: TrainingEngine) -> dict[str, int]:
    """Bytes by part at this moment."""
    optimizer, parameters = engine.deepspeed.optimizer, list(engine.module.parameters())

    def of(*names: str) -> list[torch.Tensor]:
        return list(tensors([getattr(optimizer, name, None) for name in names]))

    states = getattr(optimizer, "optimizer", optimizer).state.values()
    moments = [tensor for state in states for name, tensor in state.items() if name != "step"]
    shards = engine.zero_stage == 3
    parts = {
        "weights": storages(parameter.ds_tensor if shards else parameter.data for parameter in parameters),
        "gradients": storages([*tensors([parameter.grad for parameter in parameters]), *of(*GRADIENTS)]),
        "master weights": storages(of(*MASTERS)),
        "Adam moments": storages(moments),
    }
    assert len({address for part in parts.values() for address in part}) == sum(map(len, parts.values())), "shared"
    return {name: sum(part.values()) for name, part in parts.items()}


def cut_away(engine: TrainingEngine) -> int:
    """Bytes of gradients beyond this rank's share where ZeRO-2 keeps fp32 ones: views of whole gradients, so those of
    the parameters that a border between two ranks' shares cuts in two are held by both."""
    optimizer = engine.deepspeed.optimizer
    shares = zip(optimizer.params_in_partition, optimizer.partition_size, strict=True)
    return sum(4 * (sum(parameter.numel() for parameter in parameters) - size) for parameters, size in shares)


def accumulating(layout: str, precision: str) -> Config:
    """A run with several micro-batches a step; with one, ZeRO-1 may free fp32 gradients bucket by bucket."""
    return run_config(LAYOUTS[layout][1], precision, micro_batch_size=1)


def most_held(layout: str, precision: str) -> tuple[int, dict[str, int], int]:
    """This rank's stage, the most bytes by part after any backward of the second step, and `cut_away` of them."""
    config = accumulating(layout, precision)
    engine = build(config, MODEL)
    moments: list[dict[str, int]] = []

    def watched(backward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = backward(*arguments, **options)
            moments.append(held(engine))
            return result

        return wrapped

    take_steps(engine, config, "pretraining", range(1))
    if engine.mesh.pipeline_size > 1:
        instructions = engine.deepspeed._INSTRUCTION_MAP
        engine.deepspeed._INSTRUCTION_MAP = {**instructions, BackwardPass: watched(instructions[BackwardPass])}
    else:
        engine.deepspeed.backward = watched(engine.deepspeed.backward)
    take_steps(engine, config, "pretraining", range(1, 2))
    cut = cut_away(engine) if precision == "fp32" and engine.zero_stage == 2 else 0
    return engine.mesh.pipeline_rank, {name: max(moment[name] for moment in moments) for name in PARTS}, cut


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planned_bytes_are_those_of_a_real_engine(layout: str, precision: str) -> None:
    world_size = LAYOUTS[layout][0]
    config, model = accumulating(layout, precision), model_config(MODEL)
    stages = plan_stages(config, model, world_size)
    for stage, found, cut in run_distributed(most_held, world_size, layout, precision):
        parts = {part.name: part.size_bytes for part in memory_parts(config, model, stages[stage], world_size)}
        planned = {name: parts[name] for name in PARTS}
        planned["gradients"] += cut
        assert found == planned
