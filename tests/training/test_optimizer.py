"""Every parameter is in exactly the group that it belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from orthros_train.config import OptimizerSection
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.training.optimizer import build_optimizer, parameter_groups, set_learning_rate


def model(**options: object) -> OrthrosForCausalLM:
    return OrthrosForCausalLM(
        OrthrosConfig(
            vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, **options
        )
    )


def names_by_group(module: nn.Module, section: OptimizerSection) -> dict[str, set[str]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = parameter_groups(module.named_parameters(), section)
    return {group["name"]: {names[id(parameter)] for parameter in group["params"]} for group in groups}


def test_groups_of_a_model_with_everything() -> None:
    module = model(qk_norm=True, attention_bias=True, base_window=4)
    groups = names_by_group(module, OptimizerSection())
    kinds = {group: {".".join(name.split(".")[-2:]) for name in names} for group, names in groups.items()}
    assert kinds == {
        "decay": {f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")},
        "no_decay": {f"{name}_proj.bias" for name in "qkvo"}
        | {"q_norm.weight", "k_norm.weight", "input_layernorm.weight", "post_attention_layernorm.weight"}
        | {"norm.weight", "embed_tokens.weight", "lm_head.weight"},
        "affine": {f"{stream}_query.{part}" for stream in ("base", "output") for part in ("gain", "shift")},
    }
    assert sum(len(names) for names in groups.values()) == len(list(module.parameters()))


def test_embeddings_decay_on_request() -> None:
    groups = names_by_group(model(), OptimizerSection(decay_embeddings=True))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= groups["decay"]


def test_tied_embedding_is_one_parameter() -> None:
    groups = names_by_group(model(tie_word_embeddings=True), OptimizerSection())
    assert "model.embed_tokens.weight" in groups["no_decay"]
    assert all("lm_head.weight" not in names for names in groups.values())


def test_no_empty_group() -> None:
    assert names_by_group(model(architecture="transformer"), OptimizerSection()).keys() == {"decay", "no_decay"}


def test_frozen_parameters_are_left_out() -> None:
    module = model()
    module.model.embed_tokens.weight.requires_grad_(False)
    assert "model.embed_tokens.weight" not in names_by_group(module, OptimizerSection())["no_decay"]


def test_hyperparameters_by_group() -> None:
    section = OptimizerSection(weight_decay=0.3, affine_lr_scale=0.25, beta1=0.8, beta2=0.9, eps=1e-7)
    optimizer = build_optimizer(model().named_parameters(), section, torch.device("cpu"))
    set_learning_rate(optimizer.param_groups, 0.4)
    found = {group["name"]: (group["weight_decay"], group["lr"]) for group in optimizer.param_groups}
    assert found == {"decay": (0.3, 0.4), "no_decay": (0.0, 0.4), "affine": (0.0, pytest.approx(0.1))}
    assert {(group["betas"], group["eps"]) for group in optimizer.param_groups} == {((0.8, 0.9), 1e-7)}
