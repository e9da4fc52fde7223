"""What of the training state this rank holds, parameter by parameter, as views into DeepSpeed's flat tensors.

ZeRO-1/2 put a group's parameters one behind the other into one flat fp32 tensor and cut it evenly over the data axis,
parameters cut wherever that falls. ZeRO-3 cuts every parameter evenly, the last piece padded with zeros. Either way a
rank holds at most one contiguous piece of a parameter: the same one of the master weight and of both Adam moments.

Saving reads the pieces and loading fills them, so this is the only place that knows where DeepSpeed keeps state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from orthros_train.training.engine import TrainingEngine
from orthros_train.training.initial_model import InitialValues

MASTER, FROZEN = "fp32", "frozen"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + numel) of this rank's part of a parameter, flattened.

    `states` maps MASTER and MOMENTS (absent before the first update), or FROZEN for a parameter that is not trained, to
    flat views of numel elements each. `saved` is False where another rank holds the same piece and saves it.
    """

    name: str
    parameter: Tensor
    start: int
    states: dict[str, Tensor]
    saved: bool

    @property
    def numel(self) -> int:
        """How many elements."""
        return next(iter(self.states.values())).numel()


def state_pieces(engine: TrainingEngine) -> Iterator[Piece]:
    """Every piece that this rank holds. The views alias live tensors: use them before the next step."""
    optimizer = engine.deepspeed.optimizer
    trained = _stage3(optimizer) if engine.zero_stage == 3 else _stage12(optimizer)
    for name, parameter, start, states in trained:
        yield Piece(engine.canonical_name(name), parameter, start, states, engine.saves(name, parameter))
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            start, values, whole = _frozen(engine, parameter)
            if values.numel():
                saved = engine.saves(name, parameter) and (engine.mesh.data_rank == 0 or not whole)
                yield Piece(engine.canonical_name(name), parameter, start, {FROZEN: values}, saved)


Found = tuple[str, Tensor, int, dict[str, Tensor]]


def _stage12(optimizer: Any) -> Iterator[Found]:
    for parameters, partition in zip(*_groups(optimizer), strict=True):
        states = _states(optimizer, partition)
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:  # some part of it lies on this rank
                here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
                views = {state: flat.narrow(0, here.start, here.numel) for state, flat in states.items()}
                yield optimizer.param_names[parameter], parameter, there.start, views


def _groups(optimizer: Any) -> tuple[list[list[Any]], list[Tensor]]:
    """The parameters of each group of ZeRO-1/2 and this rank's part of its flat fp32 tensor."""
    if hasattr(optimizer, "bf16_groups"):  # the optimizer of ZeRO-1 with bf16 weights names its parts differently
        return optimizer.bf16_groups, optimizer.fp32_groups_flat_partition
    return optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups


def _stage3(optimizer: Any) -> Iterator[Found]:
    for parameters, partition in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        states = _states(optimizer, partition)
        offset = 0
        for parameter in parameters:
            start, owned = _stage3_range(parameter, torch.distributed.get_rank(optimizer.dp_process_group))
            if owned:
                views = {state: flat.narrow(0, offset, owned) for state, flat in states.items()}
                yield optimizer.param_names[parameter], parameter, start, views
            offset += parameter.ds_tensor.ds_numel


def _stage3_range(parameter: Any, data_rank: int) -> tuple[int, int]:
    """First element and number of elements that a rank of the data axis holds under ZeRO-3."""
    length = parameter.ds_tensor.ds_numel
    start = data_rank * length
    return start, max(0, min(length, parameter.ds_numel - start))


def _states(optimizer: Any, partition: Tensor) -> dict[str, Tensor]:
    adam = optimizer.optimizer.state.get(partition, {})
    return {MASTER: partition.data, **{moment: adam[moment] for moment in MOMENTS if moment in adam}}


def _frozen(engine: TrainingEngine, parameter: Any) -> tuple[int, Tensor, bool]:
    """Start and values of a frozen parameter's piece, and whether every rank of the data axis holds the whole."""
    if engine.zero_stage < 3:
        return 0, parameter.data.view(-1), True
    start, owned = _stage3_range(parameter, engine.mesh.data_rank)
    return start, parameter.ds_tensor.data.view(-1).narrow(0, 0, owned), False


def make_moments(engine: TrainingEngine, updates: int) -> None:
    """Give every flat tensor empty moments and its own step counter, as after `updates` updates of its parameters."""
    optimizer = engine.deepspeed.optimizer
    adam = optimizer.optimizer
    flat = optimizer.fp32_partitioned_groups_flat if engine.zero_stage == 3 else _groups(optimizer)[1]
    for partition in flat:
        device = partition.device if adam.defaults["fused"] else torch.device("cpu")
        adam.state[partition] = {
            "step": torch.tensor(float(updates), device=device),
            **{moment: torch.zeros_like(partition) for moment in MOMENTS},
        }


def start_from_fp32(engine: TrainingEngine, values: InitialValues) -> None:
    """Give a fresh bf16 engine its master weights in full precision: DeepSpeed makes them from rounded ones."""
    for piece in state_pieces(engine):
        if MASTER in piece.states:
            shape = getattr(piece.parameter, "ds_shape", piece.parameter.shape)  # ZeRO-3 takes the shape away
            part = engine.factory.blank(piece.parameter, shape)
            values.set(piece.name, part)
            piece.states[MASTER].copy_(part.view(-1).narrow(0, piece.start, piece.numel))


def publish_master_weights(engine: TrainingEngine) -> None:
    """Make the weights that the model computes with follow the master weights; collective."""
    optimizer = engine.deepspeed.optimizer
    if engine.zero_stage < 3:
        optimizer.update_lp_params()
        return
    optimizer.checkpoint_event_prologue()
    for index, partition in enumerate(optimizer.fp32_partitioned_groups_flat):
        optimizer.fp16_partitioned_groups_flat[index].data.copy_(partition.data)
        optimizer._unflatten_partitioned_parameters(index)
    optimizer.checkpoint_event_epilogue()
