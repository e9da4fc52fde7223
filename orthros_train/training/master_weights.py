"""The full fp32 master weights of a checkpoint, put together from the shards of any ZeRO stage.

Unpickles: only for checkpoints whose hashes have been verified.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orthros_train.parallel.quiet_deepspeed import silenced
from orthros_train.training.manifest import read_manifest


def master_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Name -> fp32 tensor for every parameter; a tied head appears under both its names or only the embedding's.

    Frozen parameters have no master weight: theirs is the weight itself.
    """
    if read_manifest(checkpoint).layout.zero_stage == 3:
        return _stage3(checkpoint)
    (model_file,) = checkpoint.glob("mp_rank_*_model_states.pt")
    model_state = _load(model_file)
    pieces: dict[str, list[torch.Tensor]] = {}
    for rank in range(model_state["dp_world_size"]):
        (file,) = checkpoint.glob(f"*zero_pp_rank_{rank}_mp_rank_*_optim_states.pt")
        optimizer = _load(file)["optimizer_state_dict"]
        groups = zip(
            optimizer["param_slice_mappings"], optimizer["single_partition_of_fp32_groups"], strict=True
        )  # on each rank: where its pieces of a group's parameters lie in its flat part of the group
        for slices, flat in groups:
            for name, address in slices.items():
                pieces.setdefault(name, []).append(flat.narrow(0, address.start, address.numel))
    weights = {name: tensor.float() for name, tensor in model_state["module"].items()}
    for name, parts in pieces.items():
        weights[name] = torch.cat(parts).view(weights[name].shape)
    for name, source in model_state["shared_params"].items():
        weights[name] = weights[source]
    return weights


def _stage3(checkpoint: Path) -> dict[str, torch.Tensor]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint  # noqa: PLC0415  rarely needed

    with silenced():
        return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint.parent), tag=checkpoint.name)


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
