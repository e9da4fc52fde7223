"""torch.compile of the layers, on request: what lies around attention becomes few kernels.

Layers share their code, so that one of each kind is compiled, again once lengths differ. Attention has kernels of its
own, chosen by what each query sees, and stays as it is.
"""

from __future__ import annotations

import os
import shutil

import torch

from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM


def compile_layers(model: OrthrosForCausalLM, device: torch.device) -> None:
    """Have every layer compiled at its first call.

    Raises:
        InputError: the machine lacks what compiles.
    """
    compiler = os.environ.get("CXX", "g++")
    if device.type == "cpu" and shutil.which(compiler) is None:
        raise InputError(
            f"train.compile needs a C++ compiler and {compiler} is not on PATH: install one, name it in CXX, or set "
            "train.compile: false"
        )
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attend_heads = torch.compiler.disable(attention.attend_heads)
        layer.compile()
