"""The dry run's communication volumes against the collectives that are really called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthros_train.config import Config
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.quiet_deepspeed import deepspeed, silenced
from orthros_train.planning import communication_estimate
from orthros_train.planning.communication_estimate import boundary_bytes, bubble_share, tensor_bytes, traffic
from orthros_train.planning.stage_plan import plan_stages
from orthros_train.training.engine import deepspeed_config
from tests.distributed import run_distributed

from .collectives import RecordedCollectives
from .stage_runs import layout_config, running_stage, small_model


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["all", "checkpointing"])
@pytest.mark.parametrize(
    "changes",
    [
        {"tensor": 2},
        {"tensor": 4, "qk_norm": True, "attention_bias": True},
        {"tensor": 4, "qk_norm": True, "attention_bias": True, "sequence": True},
        {"tensor": 2, "pipeline": 3},
        {"tensor": 2, "pipeline": 3, "sequence": True, "tie_word_embeddings": True},
        {"tensor": 2, "pipeline": 2, "architecture": "transformer", "sequence": True},
        {"tensor": 2, "architecture": "transformer"},
    ],
    ids=str,
)
def test_the_tensor_axis_sends_what_a_stage_calls(changes: dict[str, Any], checkpointing: bool, precision: str) -> None:
    config = layout_config(precision, checkpointing, **changes)
    tensor = config.parallel.tensor
    world_size = 3 * tensor * config.parallel.pipeline
    for stage in plan_stages(config, small_model(config), world_size):
        with running_stage(config, world_size, stage.index) as running:
            inputs = running.inputs()
            with RecordedCollectives() as recorded:
                output = running.forward(inputs)
                output.backward(torch.ones_like(output))
        assert not recorded.unknown
        assert set(recorded.sent_bytes) == {tensor}
        assert recorded.sent_bytes[tensor] == tensor_bytes(config, running.model, stage), (stage, recorded.calls)


def data_parallel_step(config: Config, micro_batches: int, live_parameters: int) -> tuple[int, int]:
    """Bytes that a rank sends in its second step, and its calls while autograd runs; ZeRO-3 keeps that many
    gathered parameters for the backward."""
    model = OrthrosForCausalLM(small_model(config))
    settings = deepspeed_config(config, micro_batches)
    settings["zero_optimization"].update(
        stage3_param_persistence_threshold=0,  # a small model has nothing else
        stage3_max_live_parameters=live_parameters,
        stage3_max_reuse_distance=live_parameters,
        reduce_bucket_size=2000,  # several
    )
    with silenced():
        deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
        optimizer = torch.optim.AdamW(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    overlap = config.parallel.resolved_overlap_gradients
    assert engine.zero_overlap_comm() == overlap
    assert config.parallel.zero_stage != 2 or engine.optimizer.overlap_comm == overlap  # ZeRO-3's does not tell
    for _ in range(2):
        with RecordedCollectives() as recorded:
            for _ in range(micro_batches):
                ids = torch.randint(0, 301, (2, 96))
                engine.backward(engine(ids, shift_labels=ids, num_items_in_batch=192, use_cache=False).loss)
                engine.step()
    assert not recorded.unknown
    return sum(recorded.sent_bytes.values()), recorded.in_backward


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("zero_stage", "live_parameters", "overlap"),
    [(1, 10**9, None), (2, 10**9, None), (3, 10**9, None), (3, 0, None), (2, 10**9, True)],
    ids=["1", "2", "3", "3-large", "2-overlap"],
)
def test_the_data_axis_sends_what_deepspeed_calls(
    zero_stage: int, live_parameters: int, overlap: bool | None, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication_estimate, "LIVE_PARAMETERS", live_parameters)
    config = layout_config(precision, zero_stage=zero_stage, overlap_gradients=overlap)
    config.train.global_batch_size = 12
    (stage,) = plan_stages(config, small_model(config), 2)
    (kind,) = traffic(config, small_model(config), stage, 2)
    sent, in_backward = run_distributed(data_parallel_step, 2, config, 3, live_parameters)[0]
    assert (in_backward > 0) == (zero_stage > 1)
    assert kind.size_bytes == pytest.approx(sent, rel=1e-3)  # and a few scalars


def test_kinds_of_a_layout() -> None:
    config = layout_config("bf16", tensor=2, pipeline=2, tie_word_embeddings=True, num_hidden_layers=6)
    model = small_model(config)
    stages = plan_stages(config, model, 8)
    first, last = (traffic(config, model, stage, 8) for stage in stages)
    assert [kind.name for kind in first] == ["tensor", "pipeline", "tied embedding", "data"]
    residual, layout = 2 * 2 * 96 * 64 * 2, 2 * 96 * 8
    assert [boundary_bytes(config, model, stage) for stage in stages] == [residual + layout, residual]
    assert first[1].size_bytes == 4 * (residual + layout)
    assert last[1].size_bytes == 4 * residual
    assert first[2].size_bytes == last[2].size_bytes == 4 * 151 * 64


def test_bubble() -> None:
    assert bubble_share(1, 4) == 0
    assert bubble_share(4, 1) == 0.75
    assert bubble_share(4, 13) == 3 / 16
