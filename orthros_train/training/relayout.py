"""Continuing a checkpoint on another number of ranks or ZeRO stage.

DeepSpeed's converter turns the checkpoint into its universal form, one folder a parameter:

    zero/NAME/{fp32,exp_avg,exp_avg_sq}.pt    the full master weight and Adam moments

and every rank reads from it the pieces it owns in the new layout. The reading is ours: DeepSpeed 0.19's own reader
fails where a small group leaves a rank without parameters, and for ZeRO-3 shares one step counter among groups and
gives all groups the first one's hyperparameters. Here groups keep what the configuration says, and each state its own
counter, which is the number of updates that the manifest records.

Conversion unpickles: only for a run's own checkpoints, whose hashes have been verified.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from orthros_train.errors import InputError
from orthros_train.parallel.quiet_deepspeed import silenced
from orthros_train.training.checkpoints import RELAYOUT
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.manifest import Manifest

MOMENTS = ("exp_avg", "exp_avg_sq")


def load_relayouted(engine: TrainingEngine, checkpoint: Path, manifest: Manifest) -> None:
    """Load a checkpoint saved in another layout into a fresh engine; collective.

    Raises:
        InputError: the disk has no room for the conversion.
    """
    if manifest.progress.updates == 0:
        return  # the checkpoint holds the initial weights, which the engine has
    ranks = engine.ranks
    scratch = checkpoint.parent / f"{RELAYOUT}{checkpoint.name}"
    try:
        ranks.on_main(lambda: _convert(checkpoint, scratch))
        restore = _restore_stage3 if engine.zero_stage == 3 else _restore_stage12
        restore(engine.deepspeed.optimizer, UniversalFolder(scratch / "universal" / "zero"), manifest.progress.updates)
        ranks.gather_objects(None)  # nobody reads any more
    finally:
        if ranks.is_main:
            shutil.rmtree(scratch, ignore_errors=True)


def _convert(checkpoint: Path, scratch: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal  # noqa: PLC0415  slow to import, and rarely needed

    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    needed = 2 * sum(file.stat().st_size for file in checkpoint.glob("*.pt"))  # fragments, then merged parameters
    free = shutil.disk_usage(scratch).free
    if free < needed:
        raise InputError(
            f"resuming {checkpoint.name} on another layout needs {needed / 2**30:.1f} GiB in {checkpoint.parent} while "
            f"it converts, but {free / 2**30:.1f} GiB are free; make room, or resume on the layout it was saved with"
        )
    arguments = argparse.Namespace(
        input_folder=str(checkpoint),
        output_folder=str(scratch / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with silenced():
        ds_to_universal.main(arguments)


@dataclass(frozen=True)
class UniversalFolder:
    """The full tensors of a universal checkpoint, by parameter name."""

    path: Path

    def tensor(self, name: str, state: str) -> torch.Tensor:
        """The full `state` (fp32, exp_avg or exp_avg_sq) of a parameter, flat, memory-mapped."""
        loaded = torch.load(self.path / name / f"{state}.pt", map_location="cpu", mmap=True, weights_only=True)
        tensor = loaded["param"] if isinstance(loaded, dict) else loaded
        return tensor.reshape(-1)


def _restore_stage12(optimizer: Any, source: UniversalFolder, updates: int) -> None:
    """ZeRO-1/2: a group is one flat fp32 tensor cut evenly over the ranks, parameters cut wherever that falls."""
    bf16 = hasattr(optimizer, "bf16_groups")  # the optimizer of ZeRO-1 with bf16 weights names its parts differently
    groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
    partitions = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    for parameters, partition in zip(groups, partitions, strict=True):
        state = _fresh_adam_state(optimizer, partition, updates)
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is None:
                continue  # no part of this parameter lies on this rank
            name = optimizer.param_names[parameter]
            here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
            for key, flat in (("fp32", partition.data), *((moment, state[moment]) for moment in MOMENTS)):
                piece = source.tensor(name, key).narrow(0, there.start, there.numel)
                flat.narrow(0, here.start, here.numel).copy_(piece)
    optimizer.update_lp_params()


def _restore_stage3(optimizer: Any, source: UniversalFolder, updates: int) -> None:
    """ZeRO-3: every parameter is cut evenly over the ranks, the last piece padded with zeros."""
    optimizer.checkpoint_event_prologue()
    for index, parameters in enumerate(optimizer.fp16_groups):
        partition = optimizer.fp32_partitioned_groups_flat[index]
        state = _fresh_adam_state(optimizer, partition, updates)
        offset = 0
        for parameter in parameters:
            length = parameter.ds_tensor.ds_numel
            start = torch.distributed.get_rank() * length
            owned = max(0, min(length, parameter.ds_numel - start))
            name = optimizer.param_names[parameter]
            for key, flat in (("fp32", partition.data), *((moment, state[moment]) for moment in MOMENTS)):
                target = flat.narrow(0, offset, length)
                target.zero_()
                if owned:
                    target[:owned].copy_(source.tensor(name, key).narrow(0, start, owned))
            offset += length
        optimizer.fp16_partitioned_groups_flat[index].data.copy_(partition.data)
        optimizer._unflatten_partitioned_parameters(index)
    optimizer.checkpoint_event_epilogue()


def _fresh_adam_state(optimizer: Any, partition: torch.Tensor, updates: int) -> dict[str, torch.Tensor]:
    """Adam's state of one flat tensor: its own step counter (where AdamW wants it) and empty moments."""
    adam = optimizer.optimizer
    device = partition.device if adam.defaults["fused"] else torch.device("cpu")
    state = {"step": torch.tensor(float(updates), device=device)}
    state.update({moment: torch.zeros_like(partition) for moment in MOMENTS})
    adam.state[partition] = state
    return state
