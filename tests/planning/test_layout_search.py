"""Layouts are found, ordered and refused; sizes and FLOPs are the counters' own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from orthros_train.config import Config, load_config, orthros_config
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig
from orthros_train.model.flops import training_flops
from orthros_train.planning.communication_estimate import traffic
from orthros_train.planning.layout_search import RECOMPUTED, Machines, Plan, communication_seconds, search, with_options
from orthros_train.planning.memory_estimate import Part, memory_parts
from orthros_train.planning.stage_plan import plan_stages

ROOT = Path(__file__).parents[2]
NODES = Machines(2, 4, 80.0, 8.0, 1e15, 0.4, 450.0, 50.0)


@pytest.fixture(scope="module")
def config() -> Config:
    return load_config(ROOT / "configs" / "orthros_1.3b.yaml")


@pytest.fixture(scope="module")
def model(config: Config) -> OrthrosConfig:
    return orthros_config(config, 32000)


@pytest.fixture(scope="module")
def found(config: Config, model: OrthrosConfig) -> tuple[list[Plan], list[Plan]]:
    return search(config, model, NODES)


def test_what_fits_is_ordered_and_the_rest_is_too_large(found: tuple[list[Plan], list[Plan]]) -> None:
    fitting, others = found
    seconds = [plan.step_seconds for plan in fitting]
    assert seconds == sorted(seconds, key=lambda value: float(f"{value:.2g}"))
    assert all(plan.memory_gib <= 72 for plan in fitting)
    assert all(plan.memory_gib > 72 for plan in others)
    assert others
    tried = [tuple(plan.options.values()) for plan in (*fitting, *others)]
    assert len(set(tried)) == len(tried)
    assert {plan.options["parallel.tensor"] for plan in fitting} == {1, 2, 4}  # inside a node
    assert {plan.options["parallel.pipeline"] for plan in fitting} == {1, 2, 4, 8}


@pytest.mark.parametrize("index", [0, 5, -1])
def test_a_plan_is_what_the_counters_say_of_its_options(
    config: Config, model: OrthrosConfig, found: tuple[list[Plan], list[Plan]], index: int
) -> None:
    plan = found[0][index]
    tried = with_options(config, plan.options)
    stages = plan_stages(tried, model, 8)
    assert list(plan.parts) in [memory_parts(tried, model, stage, 8) for stage in stages]
    assert list(plan.sent) in [traffic(tried, model, stage, 8) for stage in stages]
    flops = config.train.global_batch_size * training_flops(model, [config.train.sequence_length]).total
    again = RECOMPUTED if plan.options["train.activation_checkpointing"] else 1.0
    assert plan.compute_seconds == pytest.approx(flops * again / (8 * 0.4e15) / (1 - plan.bubble), rel=1e-12)


def test_less_memory_leaves_less_choice(
    config: Config, model: OrthrosConfig, found: tuple[list[Plan], list[Plan]]
) -> None:
    fitting, _ = search(config, model, replace(NODES, memory_gib=16.0))
    assert 0 < len(fitting) < len(found[0])
    assert search(config, model, replace(NODES, memory_gib=8.5))[0] == []


def test_traffic_takes_the_time_of_its_road() -> None:
    tensor, data = Part("tensor", 450 * 10**9, ""), Part("data", 100 * 10**9, "")
    assert communication_seconds([tensor], NODES) == 1.0
    assert communication_seconds([data], NODES) == 1.0  # half of it hidden, at 50 GB/s
    assert communication_seconds([data], replace(NODES, nodes=1)) == pytest.approx(0.5 * 100 / 450)


def test_an_impossible_world_is_refused(config: Config, model: OrthrosConfig) -> None:
    with pytest.raises(InputError, match="no layout of 49 GPUs is possible: "):
        search(config, model, replace(NODES, nodes=7, gpus_per_node=7))
