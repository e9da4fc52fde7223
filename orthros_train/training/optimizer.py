"""AdamW and its three parameter groups.

* decay: projection weights (and embeddings if `optimizer.decay_embeddings`);
* no decay: norms, q_norm/k_norm, biases, embeddings;
* affines: the gains and shifts of the two query affines, no decay, learning rate times `optimizer.affine_lr_scale`.

Every parameter is in exactly one group. DeepSpeed drops empty groups, so none is built empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from orthros_train.config import OptimizerSection

AFFINES = ("base_query", "output_query")
EMBEDDINGS = ("embed_tokens", "lm_head")
GROUPS = ("decay", "no_decay", "affine")


def group_of(name: str, parameter: nn.Parameter, decay_embeddings: bool) -> str:
    """The group of the parameter with this canonical name, by name and number of dims."""
    parts = name.split(".")
    if len(parts) >= 2 and parts[-2] in AFFINES:
        return "affine"
    if len(parts) >= 2 and parts[-2] in EMBEDDINGS:
        return "decay" if decay_embeddings else "no_decay"
    return "decay" if parameter.ndim >= 2 else "no_decay"


def parameter_groups(named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection) -> list[dict[str, Any]]:
    """Optimizer groups over the trainable parameters; `lr_scale` multiplies the schedule's learning rate."""
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    members: dict[str, list[nn.Parameter]] = {group: [] for group in GROUPS}
    for name, parameter in trainable:
        members[group_of(name, parameter, section.decay_embeddings)].append(parameter)
    grouped = [id(parameter) for group in members.values() for parameter in group]
    assert sorted(grouped) == sorted({id(parameter) for _, parameter in trainable}), "a parameter is in two groups"
    return [
        {
            "name": group,
            "params": parameters,
            "weight_decay": section.weight_decay if group == "decay" else 0.0,
            "lr_scale": section.affine_lr_scale if group == "affine" else 1.0,
        }
        for group, parameters in members.items()
        if parameters
    ]


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], section: OptimizerSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW over the groups of parameters with canonical names; one fused kernel a group on CUDA."""
    return torch.optim.AdamW(
        parameter_groups(named, section),
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        fused=device.type == "cuda",
    )


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Give every group the schedule's rate times its own scale."""
    for group in groups:
        group["lr"] = rate * group["lr_scale"]
