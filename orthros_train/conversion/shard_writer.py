"""Weights into safetensors shards and an index, holding one shard in memory at a time."""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from orthros_train.errors import InputError
from orthros_train.model_folder.json_files import write_json
from orthros_train.model_folder.tensor_folder import TensorInfo

DEFAULT_SHARD_SIZE = "5GB"
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write: what it will be, and the function that makes it when its turn comes."""

    info: TensorInfo
    make: Callable[[], Tensor]


@dataclass(frozen=True)
class ShardPlan:
    """Which file each tensor goes to, known before anything is read.

    Attributes:
        files: file names and the tensors of each, in order.
        total_bytes: of all tensors.
        total_parameters: elements of all tensors.
    """

    files: dict[str, list[PlannedTensor]]
    total_bytes: int
    total_parameters: int


def shard_bytes(size: int | str) -> int:
    """A shard size as bytes; text is a positive number with a unit of powers of 1000, as in "5GB" or "1.5 MB".

    Raises:
        InputError: it is anything else, or less than a byte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?B)", str(size).strip(), flags=re.IGNORECASE | re.ASCII)
    number = size if isinstance(size, int) else float(found[1]) * _UNITS[found[2].upper()] if found else 0
    if not 1 <= number < math.inf:
        raise InputError(f"shard size {size!r} is not understood or not positive; give one such as 5GB or 500MB")
    return int(number)


def plan_shards(tensors: Sequence[PlannedTensor], max_shard_size: int | str = DEFAULT_SHARD_SIZE) -> ShardPlan:
    """Fill shards of at most `max_shard_size` (bytes, or text such as "5GB") in the given order.

    Raises:
        InputError: as `shard_bytes`.
    """
    by_name = {tensor.info.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.info.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes(max_shard_size),
    )
    files = {file: [by_name[name] for name in names] for file, names in split.filename_to_tensors.items()}
    elements = sum(tensor.info.nbytes // tensor.info.dtype.itemsize for tensor in tensors)
    return ShardPlan(files, sum(tensor.info.nbytes for tensor in tensors), elements)


def write_shards(folder: Path, plan: ShardPlan, report: Callable[[int, str], None]) -> None:
    """Make and write every tensor, and the index where there are several files.

    Args:
        folder: exists; the files are not seen by others before they are complete.
        plan: of `plan_shards`.
        report: called with the bytes done so far and the tensor's name.

    Raises:
        InputError: the disk is full or cannot be written.
    """
    done = 0
    for file, planned in plan.files.items():
        tensors: dict[str, Tensor] = {}
        for tensor in planned:
            tensors[tensor.info.name] = tensor.make().contiguous()
            done += tensor.info.nbytes
            report(done, tensor.info.name)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
            (folder / file).chmod(folder.stat().st_mode & 0o666)  # safetensors makes it readable to the owner alone
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            raise InputError(f"cannot write to {folder.parent}: {'no space left' if full else error}") from error
    if len(plan.files) > 1:
        names = {tensor.info.name: file for file, planned in plan.files.items() for tensor in planned}
        metadata = {"total_parameters": plan.total_parameters, "total_size": plan.total_bytes}
        write_json(
            folder / "model.safetensors.index.json", {"metadata": metadata, "weight_map": dict(sorted(names.items()))}
        )
