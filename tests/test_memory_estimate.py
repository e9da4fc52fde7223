"""The dry run's memory estimate against what torch and the ZeRO stages really keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orthros_train.memory_estimate import BYTES, activation_bytes, memory_parts
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

from .test_config import minimal_config

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "base_window": 16,
}
ROWS, LENGTH = 2, 96
TRANSFORMER = {"architecture": "transformer"}


def kept_by_autograd(config: OrthrosConfig, dtype: torch.dtype, checkpointing: bool = False) -> int:
    """Bytes of distinct storages that a training forward saves for its backward, parameters left out."""
    model = OrthrosForCausalLM(config).to(dtype).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(0, config.vocab_size, (ROWS, LENGTH))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(ids, shift_labels=ids, num_items_in_batch=ids.numel(), use_cache=False).loss
    assert loss is not None
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"base_sinks": 1},
        {"qk_norm": True},
        {"query_affine": "none"},
        {"num_hidden_layers": 1},
        {"hidden_size": 128, "intermediate_size": 64, "num_key_value_heads": 4},
        {**TRANSFORMER},
        {**TRANSFORMER, "base_window": None},
    ],
    ids=str,
)
def test_activations_are_what_autograd_keeps(changes: dict[str, Any], precision: str) -> None:
    config = OrthrosConfig(**{**SHAPE, **changes})
    kept = kept_by_autograd(config, {"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    tokens = ROWS * LENGTH
    log_probabilities = tokens * config.vocab_size * 4
    estimate = activation_bytes(config, tokens, tokens, BYTES[precision], checkpointing=False)
    assert estimate + log_probabilities == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize("changes", [{}, TRANSFORMER], ids=["orthros", "transformer"])
def test_checkpointing_keeps_one_tensor_a_layer(changes: dict[str, Any]) -> None:
    shallow, deep = (OrthrosConfig(**{**SHAPE, **changes, "num_hidden_layers": layers}) for layers in (3, 5))
    tokens = ROWS * LENGTH
    kept = [kept_by_autograd(config, torch.float32, checkpointing=True) for config in (shallow, deep)]
    estimates = [activation_bytes(config, tokens, tokens, 4, checkpointing=True) for config in (shallow, deep)]
    assert estimates[1] - estimates[0] == pytest.approx(kept[1] - kept[0], rel=0.01)
    assert estimates[0] < activation_bytes(shallow, tokens, tokens, 4, checkpointing=False)


def sizes(world_size: int, precision: str, stage: int) -> dict[str, int]:
    """Bytes by part of a model of 1,000,000 parameters or so, in bytes a parameter of one rank."""
    config = minimal_config(**SHAPE)
    config.precision, config.parallel.zero_stage = precision, stage  # type: ignore[assignment]
    return {part.name: part.size_bytes for part in memory_parts(config, OrthrosConfig(**SHAPE), world_size)}


@pytest.mark.parametrize(
    ("precision", "stage", "bytes_a_parameter"),
    [  # weights, gradients, master weights, moments; a share is a quarter
        ("bf16", 1, (2, 4, 1, 2)),
        ("bf16", 2, (2, 1, 1, 2)),
        ("bf16", 3, (0.5, 1, 1, 2)),
        ("fp32", 1, (4, 4, 1, 2)),
        ("fp32", 2, (4, 1, 1, 2)),
        ("fp32", 3, (1, 1, 0, 2)),
    ],
)
def test_zero_stages_share_what_they_promise(precision: str, stage: int, bytes_a_parameter: tuple[float, ...]) -> None:
    parameters = sum(parameter.numel() for parameter in OrthrosForCausalLM(OrthrosConfig(**SHAPE)).parameters())
    found = sizes(4, precision, stage)
    for name, expected in zip(
        ("weights", "gradients", "master weights", "Adam moments"), bytes_a_parameter, strict=True
    ):
        assert found[name] == pytest.approx(expected * parameters, rel=1e-4), name


def test_activations_and_logits_do_not_depend_on_the_ranks() -> None:
    one, many = sizes(1, "bf16", 1), sizes(8, "bf16", 1)
    assert one["activations"] == many["activations"]
    assert one["logits"] == many["logits"] == 32 * 300 * (2 + 4 + 4)
