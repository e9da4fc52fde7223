"""Which layouts of a run fit the GPUs, and which of them should be fastest; before anything is started.

Sizes are those of --dry-run: parameters of really built stages, memory by part, bytes sent. The time of a step is a
model with few assumptions, enough to order layouts and no forecast:

* compute: the FLOPs of the step, a third of them again where activations are recomputed, at `efficiency` of the peak,
  stretched by the pipeline's bubble;
* the tensor axis lies inside a node and sends at `node_gb_per_second`; the data and the pipeline axis send at
  `network_gb_per_second` a GPU where there is more than one node;
* half of the data axis's traffic hides behind compute, nothing else does.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from ..config import Config, gradient_accumulation_steps
from ..errors import InputError
from ..model import OrthrosConfig
from ..model.flops import training_flops
from .communication_estimate import bubble_share, traffic
from .memory_estimate import Part, memory_parts
from .stage_plan import Stage, plan_stages

GIB, GB = 2**30, 10**9
MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
HIDDEN_DATA_TRAFFIC = 0.5
RECOMPUTED = 4 / 3  # forward, forward again and backward, of forward and backward


@dataclass(frozen=True)
class Machines:
    """What there is to run on.

    Attributes:
        memory_gib: of a GPU.
        reserved_gib: of it, for what the estimate leaves out: framework, communication buffers, fragmentation.
        peak_flops: of a GPU, in the run's precision.
        efficiency: share of the peak that a step's compute reaches.
        node_gb_per_second: that a GPU sends to others of its node, in 10^9 bytes.
        network_gb_per_second: the same to other nodes.
    """

    nodes: int
    gpus_per_node: int
    memory_gib: float
    reserved_gib: float
    peak_flops: float
    efficiency: float
    node_gb_per_second: float
    network_gb_per_second: float

    @property
    def world_size(self) -> int:
        """All GPUs."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Plan:
    """One layout: the options that make it, and what it should cost. Figures are of the stage that needs most."""

    options: dict[str, object]
    parts: tuple[Part, ...]
    sent: tuple[Part, ...]
    micro_batches: int
    bubble: float
    compute_seconds: float
    communication_seconds: float

    @property
    def memory_gib(self) -> float:
        """Of the GPU that needs most."""
        return sum(part.size_bytes for part in self.parts) / GIB

    @property
    def step_seconds(self) -> float:
        """By the model above."""
        return self.compute_seconds + self.communication_seconds

    @property
    def reason(self) -> str:
        """Where its time goes, in words."""
        largest = max(self.sent, key=lambda part: part.size_bytes, default=None)
        words = [f"{self.communication_seconds / self.step_seconds:.0%} communication"]
        if largest is not None:
            words.append(f"most of it on the {largest.name} axis" if largest.name in AXES else f"most {largest.name}")
        if self.bubble:
            words.append(f"{self.bubble:.0%} bubble")
        if self.options["train.activation_checkpointing"]:
            words.append("recomputes a third")
        return ", ".join(words)


AXES = ("tensor", "pipeline", "data")


def search(config: Config, model: OrthrosConfig, machines: Machines) -> tuple[list[Plan], list[Plan]]:
    """The layouts that fit, fastest first, and those that do not, with the least memory first.

    Raises:
        InputError: no layout is possible, whatever the memory; with the reason of the last one tried.
    """
    plans: list[Plan] = []
    refusal: Exception | None = None
    built: dict[tuple[int, int], list[Stage]] = {}
    for options in candidates(machines):
        try:
            tried = with_options(config, options)
            gradient_accumulation_steps(tried, machines.world_size)
            axes = (tried.parallel.tensor, tried.parallel.pipeline)
            if axes not in built:
                built[axes] = plan_stages(tried, model, machines.world_size)
            plans.append(estimate(tried, model, built[axes], options, machines))
        except (InputError, ValidationError) as error:
            refusal = error
    if not plans:
        raise InputError(f"no layout of {machines.world_size} GPUs is possible: {refusal}")
    room = machines.memory_gib - machines.reserved_gib
    fitting = sorted((plan for plan in plans if plan.memory_gib <= room), key=_preference)
    others = sorted((plan for plan in plans if plan.memory_gib > room), key=lambda plan: plan.memory_gib)
    return fitting, others


def _preference(plan: Plan) -> tuple[float, int]:
    """Fastest first; where the model sees no difference, more rows at once, which real kernels like better."""
    rows = plan.options["train.micro_batch_size"]
    assert isinstance(rows, int)
    return float(f"{plan.step_seconds:.2g}"), -rows


def candidates(machines: Machines) -> Iterator[dict[str, object]]:
    """Options to try: the tensor axis within a node, ZeRO 2 and 3 without a pipeline."""
    tensors = [size for size in range(1, machines.gpus_per_node + 1) if machines.gpus_per_node % size == 0]
    pipelines = [size for size in range(1, machines.world_size + 1) if machines.world_size % size == 0]
    for tensor, pipeline in itertools.product(tensors, pipelines):
        if machines.world_size % (tensor * pipeline):
            continue
        for stage, micro, again in itertools.product(
            (1, 2, 3) if pipeline == 1 else (1,), MICRO_BATCHES, (False, True)
        ):
            yield {
                "parallel.tensor": tensor,
                "parallel.sequence": tensor > 1,
                "parallel.pipeline": pipeline,
                "parallel.zero_stage": stage,
                "train.micro_batch_size": micro,
                "train.activation_checkpointing": again,
            }


def with_options(config: Config, options: dict[str, object]) -> Config:
    """`config` with options replaced, checked again. Raises ValidationError."""
    values = config.model_dump()
    for name, value in options.items():
        section, _, option = name.partition(".")
        values[section][option] = value
    return Config.model_validate(values)


def estimate(
    config: Config, model: OrthrosConfig, stages: list[Stage], options: dict[str, object], machines: Machines
) -> Plan:
    """What a layout costs. Raises InputError where it is impossible."""
    world, train = machines.world_size, config.train
    micro_batches = gradient_accumulation_steps(config, world)
    parts = max(
        (memory_parts(config, model, stage, world) for stage in stages),
        key=lambda found: sum(part.size_bytes for part in found),
    )
    sent = max(
        (traffic(config, model, stage, world) for stage in stages),
        key=lambda found: communication_seconds(found, machines),
    )
    bubble = bubble_share(config.parallel.pipeline, micro_batches)
    flops = train.global_batch_size * training_flops(model, [train.sequence_length]).total
    executed = flops * (RECOMPUTED if train.activation_checkpointing else 1.0)
    compute = executed / (world * machines.peak_flops * machines.efficiency) / (1 - bubble)
    seconds = communication_seconds(sent, machines)
    return Plan(options, tuple(parts), tuple(sent), micro_batches, bubble, compute, seconds)


def communication_seconds(sent: list[Part], machines: Machines) -> float:
    """How long a rank sends in one step, as far as that does not hide behind compute."""
    far = machines.network_gb_per_second if machines.nodes > 1 else machines.node_gb_per_second
    total = 0.0
    for part in sent:
        speed = machines.node_gb_per_second if part.name == "tensor" else far
        shown = 1 - HIDDEN_DATA_TRAFFIC if part.name == "data" else 1.0
        total += shown * part.size_bytes / (speed * GB)
    return total
