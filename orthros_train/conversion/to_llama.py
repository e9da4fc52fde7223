"""An Orthros folder as a folder of the Llama family: every shared weight, and no query affines.

Exact where the affines are the identity (as they are after a conversion) and the text fits the base window.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from orthros_train.conversion.companions import copy_companions
from orthros_train.conversion.families import Family, family_with
from orthros_train.conversion.shard_writer import DEFAULT_SHARD_SIZE, PlannedTensor, plan_shards, write_shards
from orthros_train.conversion.source_config import SHARED_OPTIONS, SourceConfig, interpret
from orthros_train.data.output_folder import check_vacant, finished_folder
from orthros_train.data.progress import Progress
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig
from orthros_train.model_folder.json_files import read_json_object, write_json
from orthros_train.model_folder.model_parameters import build_config, check_parameters, empty_model, is_affine
from orthros_train.model_folder.tensor_folder import TensorFolder


@dataclass(frozen=True)
class ToLlama:
    """What a conversion back wrote.

    Attributes:
        folder: the Llama-family folder.
        parameters: how many.
        files: of weights.
        dropped_deviation: how far a number of the dropped affines was from the identity, at most.
    """

    folder: Path
    parameters: int
    files: int
    dropped_deviation: float


def to_llama(
    source: str | Path,
    output: str | Path,
    *,
    drop_affines: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> ToLlama:
    """Convert back.

    config.json is the source's own where the model was converted from one and still is what that file describes;
    otherwise it is written for the architecture that the model's biases and norms are of.

    Args:
        source: an Orthros folder.
        output: must not exist, or be empty; it appears when it is complete.
        drop_affines: leave out affines that are not the identity, which changes the model.
        max_shard_size: bytes, or text such as "5GB".

    Raises:
        InputError: not an Orthros folder, or a damaged one; affines that were trained, without `drop_affines`; a
            windowed transformer arm, which no family's full attention equals; or no place for the output.
    """
    source, output = Path(source), Path(output)
    check_vacant(output)
    config = _read_orthros_config(source)
    shapes = {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}
    tensors = TensorFolder(source)
    check_parameters(tensors, shapes, config.tie_word_embeddings)
    deviation, farthest = _affine_deviation(tensors, [name for name in shapes if is_affine(name)])
    if deviation and not drop_affines:
        raise InputError(
            f"the query affines of {source} have been trained ({farthest} is {deviation:.3g} away from the identity) "
            "and a Llama has none; pass --drop-affines to leave them out, which changes the model"
        )
    shared = [PlannedTensor(tensors.infos[name], partial(tensors.read, name)) for name in shapes if not is_affine(name)]
    plan = plan_shards(shared, max_shard_size)
    with finished_folder(output, plan.total_bytes) as folder:
        with Progress("converting", plan.total_bytes) as progress:
            write_shards(folder, plan, progress.update)
        write_json(folder / "config.json", llama_config(config, str(source)))
        copy_companions(source, folder)
    return ToLlama(output, plan.total_parameters, len(plan.files), deviation)


def llama_config(config: OrthrosConfig, where: str) -> dict[str, Any]:
    """The content of config.json of the Llama-family model with the shared weights of `config`.

    Raises:
        InputError: no architecture of the family has these biases and norms.
    """
    original = getattr(config, "source_config", None)
    if original is None:
        family = family_with(
            qkv_bias=config.attention_bias, output_bias=bool(config.attention_output_bias), qk_norm=config.qk_norm
        )
        return _written_anew(config, family)
    described = interpret(original, f"source_config in {where}/config.json")
    return described.raw if _still_describes(described, config) else _written_anew(config, described.family)


def _read_orthros_config(source: Path) -> OrthrosConfig:
    if not (source / "config.json").is_file():
        raise InputError(f"{source} holds no config.json, so it is not a model folder")
    raw = read_json_object(source / "config.json")
    if raw.get("model_type") != "orthros":
        raise InputError(f"{source} has model_type {raw.get('model_type')!r}; only an Orthros model has a way back")
    config = build_config({key: value for key, value in raw.items() if key != "model_type"}, f"{source}/config.json")
    if config.architecture == "transformer" and config.base_window is not None:
        raise InputError(
            f"{source} is a transformer arm with a sliding window (base_window {config.base_window}), which a Llama is "
            "not; there is no exact way back"
        )
    return config


def _affine_deviation(tensors: TensorFolder, names: list[str]) -> tuple[float, str]:
    """The largest distance of an affine's number from the identity, and the name of the vector that holds it."""
    deviations = [(0.0, "")]
    for name in names:
        identity = 1.0 if name.endswith(".gain") else 0.0
        deviations.append((float((tensors.read(name).to(torch.float64) - identity).abs().max()), name))
    return max(deviations)


def _still_describes(described: SourceConfig, config: OrthrosConfig) -> bool:
    """Whether the Orthros model is, window and affines apart, what the saved original says."""
    expected = build_config(described.orthros_values(), "source_config")
    return all(getattr(expected, name) == getattr(config, name) for name in described.orthros_values())


def _written_anew(config: OrthrosConfig, family: Family) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in (*SHARED_OPTIONS, "head_dim", "rope_parameters")}
    if family.qkv_bias is None:
        values["attention_bias"] = config.attention_bias
    if "sliding_window" in family.own_keys:
        values["sliding_window"] = None
    written = AutoConfig.for_model(family.model_type, **values, architectures=[family.causal_lm])
    content: dict[str, Any] = json.loads(written.to_json_string())
    return content
