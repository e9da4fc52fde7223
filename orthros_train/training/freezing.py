"""Which parameters train."""

from __future__ import annotations

from torch import nn

from orthros_train.config.adaptation import AdaptationSection
from orthros_train.errors import InputError
from orthros_train.training.optimizer import group_of


def freeze(module: nn.Module, adaptation: AdaptationSection) -> None:
    """Take all parameters but the query affines out of training, if the configuration says so.

    Raises:
        InputError: nothing is left to train in this stage of a pipeline.
    """
    if adaptation.freeze == "none":
        return
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(group_of(name, parameter, decay_embeddings=False) == "affine")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise InputError(
            "adaptation.freeze: all_but_affines leaves nothing to train in a pipeline stage that holds no layer: lower "
            "parallel.pipeline"
        )
