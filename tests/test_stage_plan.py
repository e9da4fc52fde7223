"""The planned stages are the run's own: nothing missing, nothing twice but the tied embedding and the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.parallel.pipeline import pack_layout
from orthros_train.stage_plan import build_stage, plan_stages

from .stage_runs import layout_config, running_stage, small_model


@settings(deadline=None, max_examples=30, derandomize=True)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.integers(1, 5),
    replicas=st.integers(1, 3),
    model=st.fixed_dictionaries(
        {
            "num_hidden_layers": st.integers(5, 9),
            "num_key_value_heads": st.just(4),
            "tie_word_embeddings": st.booleans(),
            "qk_norm": st.booleans(),
            "attention_bias": st.booleans(),
            "architecture": st.sampled_from(["orthros", "transformer"]),
        }
    ),
)
def test_stages_and_their_ranks_add_up_to_the_model(
    tensor: int, pipeline: int, replicas: int, model: dict[str, Any]
) -> None:
    config = layout_config(tensor=tensor, pipeline=pipeline, **model)
    whole = small_model(config)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in OrthrosForCausalLM(whole).parameters())
    stages = plan_stages(config, whole, tensor * pipeline * replicas)
    assert [layer for stage in stages for layer in stage.layers] == list(range(whole.num_hidden_layers))
    assert [(stage.is_first, stage.is_last) for stage in stages] == [
        (index == 0, index == pipeline - 1) for index in range(pipeline)
    ]
    found = sum(stage.split * tensor + stage.parameters - stage.split for stage in stages)
    if tensor * pipeline == 1:
        found = stages[0].parameters
    padded = -(-301 // tensor) * tensor
    matrices = 1 if model["tie_word_embeddings"] and pipeline == 1 else 2  # a tied one is on two stages
    tied_twice = 301 if model["tie_word_embeddings"] and pipeline > 1 else 0
    assert found == parameters + (matrices * (padded - 301) + tied_twice) * whole.hidden_size


def test_ranks_of_a_stage_are_alike() -> None:
    config = layout_config(tensor=2, pipeline=2, sequence=True, qk_norm=True)
    model = small_model(config)
    stages = plan_stages(config, model, 12)
    for rank in range(12):
        assert build_stage(config, model, 12, rank) == stages[rank // 6]
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
def test_what_a_stage_sends_is_what_the_next_expects(sequence: bool, architecture: str) -> None:
    config = layout_config("bf16", tensor=2, pipeline=3, sequence=sequence, architecture=architecture)
    sent = None
    for stage in range(3):
        with running_stage(config, 6, stage) as running:
            inputs = running.inputs()
            if sent is not None:
                assert inputs[0].shape == sent.shape
                assert inputs[0].dtype == sent.dtype
            sent = running.forward(inputs)
    assert sent is not None
    assert sent.shape == ()  # the loss
    assert pack_layout(None, None, torch.Size((2, 96))).shape == (2, 96)


def test_a_world_that_does_not_factor_is_refused() -> None:
    config = layout_config(tensor=2, pipeline=2)
    with pytest.raises(InputError, match="6 ranks do not factor into"):
        plan_stages(config, small_model(config), 6)
