"""Which parameters train."""

from __future__ import annotations

from torch import nn

from orthros_train.config_adaptation import AdaptationSection
from orthros_train.training.optimizer import group_of


def freeze(module: nn.Module, adaptation: AdaptationSection) -> None:
    """Take all parameters but the query affines out of training, if the configuration says so."""
    if adaptation.freeze == "none":
        return
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(group_of(name, parameter, decay_embeddings=False) == "affine")
