"""The parameters that a configuration calls for, and whether a folder holds exactly them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model_folder.tensor_folder import TensorFolder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 4096  # compared at a time
AFFINE = re.compile(r"\.(base|output)_query\.(gain|shift)$")
_BUFFER = re.compile(r"\.rotary_emb\.inv_freq$")  # old transformers saved it; it follows from the configuration


def build_config(values: dict[str, Any], where: str) -> OrthrosConfig:
    """An OrthrosConfig. Raises InputError, naming `where` the values come from, if the model cannot be so."""
    try:
        return OrthrosConfig(**values)
    except damaged_model_errors() as error:
        raise InputError(f"{where} describes a model that Orthros cannot be: {error.__cause__ or error}") from error


def empty_model(config: OrthrosConfig) -> OrthrosForCausalLM:
    """The model with shapes but no data. Raises InputError for sizes that no tensor can have."""
    try:
        with torch.device("meta"):
            return OrthrosForCausalLM(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise InputError(f"a model of this size cannot be made: {str(error).splitlines()[0]}") from error


def is_affine(name: str) -> bool:
    """Whether a parameter belongs to the query affine of a stream."""
    return AFFINE.search(name) is not None


def check_parameters(tensors: TensorFolder, wanted: dict[str, tuple[int, ...]], tied: bool) -> None:
    """Raise InputError unless the folder holds the wanted names (names to shapes), in these shapes, and no others.

    A tied model may repeat its embedding as the head if the two are equal.
    """
    folder = tensors.folder
    for name in _first_of(wanted.keys() - tensors.infos.keys()):
        hint = "; does config.json lack tie_word_embeddings: true?" if name == HEAD else ""
        raise InputError(f"{folder} lacks the tensor {name} that its config.json calls for{hint}")
    for name, info in tensors.infos.items():
        if name in wanted and info.shape != wanted[name]:
            raise InputError(
                f"tensor {name} in {folder} has shape {list(info.shape)}, but its config.json calls for "
                f"{list(wanted[name])}"
            )
    unknown = {name for name in tensors.infos if name not in wanted and not _BUFFER.search(name)}
    if tied and HEAD in unknown:
        unknown.remove(HEAD)
        if not _equal(tensors, HEAD, EMBEDDING):
            raise InputError(
                f"config.json in {folder} says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ; set "
                "tie_word_embeddings to false in a copy of the folder, or remove the tensor that is wrong"
            )
    for name in _first_of(unknown):
        raise InputError(f"{folder} holds the tensor {name}, which its config.json does not call for")


def _equal(tensors: TensorFolder, first: str, second: str) -> bool:
    """Whether two matrices of the folder are equal; memory holds a block of their rows."""
    if tensors.infos[first].shape != tensors.infos[second].shape:
        return False
    rows, columns = tensors.infos[first].shape  # the embedding's was found to be right
    blocks = ((slice(start, min(start + ROWS, rows)), slice(0, columns)) for start in range(0, rows, ROWS))
    return all(torch.equal(tensors.read(first, block), tensors.read(second, block)) for block in blocks)


def _first_of(names: Iterable[str]) -> list[str]:
    """The first name in order, if there is one."""
    return sorted(names)[:1]


def model_name(folder: Path) -> str:
    """What to call the model of a folder."""
    return folder.absolute().name
