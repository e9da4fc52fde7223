"""A Llama-family folder as an Orthros folder: the same weights, and query affines that are the identity."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from orthros_train.conversion.companions import copy_companions
from orthros_train.conversion.model_card import hub_name, write_model_card
from orthros_train.conversion.shard_writer import (
    DEFAULT_SHARD_SIZE,
    PlannedTensor,
    ShardPlan,
    plan_shards,
    write_shards,
)
from orthros_train.conversion.source_config import SourceConfig, read_source_config
from orthros_train.data.output_folder import check_vacant, finished_folder
from orthros_train.data.progress import Progress
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model_folder.model_parameters import (
    build_config,
    check_parameters,
    empty_model,
    is_affine,
    model_name,
)
from orthros_train.model_folder.tensor_folder import TensorFolder, TensorInfo

DEFAULT_SINKS = 1  # pretrained Llamas park attention on the first token; a window alone would take it away


@dataclass(frozen=True)
class OrthrosForm:
    """What the source does not say about the Orthros model to make.

    Attributes:
        base_window: w, keys that a base token sees, itself included; None (transformer only): all.
        base_sinks: s, first tokens that every base token sees; None: 1 where there is a window.
        architecture: "orthros", or "transformer" for the source itself as the arm to compare with.
        widen_output_window: accept a source with a sliding window, whose output stream will see everything.
    """

    base_window: int | None
    base_sinks: int | None = None
    architecture: str = "orthros"
    widen_output_window: bool = False

    def values(self) -> dict[str, Any]:
        """Keyword arguments of OrthrosConfig. Raises InputError for a base stream without a window."""
        if self.base_window is None and self.architecture == "orthros":
            raise InputError("an Orthros model needs a window for its base stream; pass --base-window W")
        sinks = (DEFAULT_SINKS if self.base_window else 0) if self.base_sinks is None else self.base_sinks
        return {"architecture": self.architecture, "base_window": self.base_window, "base_sinks": sinks}


@dataclass(frozen=True)
class ToOrthros:
    """What a conversion wrote.

    Attributes:
        folder: the Orthros folder.
        parameters: how many, affines included.
        files: of weights.
        source_window: the sliding window that the source attended in and the output stream no longer has.
    """

    folder: Path
    parameters: int
    files: int
    source_window: int | None


def to_orthros(
    source: str | Path,
    output: str | Path,
    form: OrthrosForm,
    *,
    allow_pickle: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> ToOrthros:
    """Convert a Llama, Mistral, Qwen2 or Qwen3 folder.

    Every weight keeps its bits and dtype. With identity affines the model equals its source on texts of at most
    `base_window` tokens. The source's config.json goes along as `source_config`, for the way back.

    Args:
        source: a Hugging Face folder: config.json, safetensors, tokenizer.
        output: must not exist, or be empty; it appears when it is complete.
        form: window and sinks of the base stream.
        allow_pickle: read pytorch_model.bin files, tensors only.
        max_shard_size: bytes, or text such as "5GB"; about what the conversion needs of memory.

    Raises:
        InputError: anything about the folder that cannot be converted exactly, or no place for the output.
    """
    source, output = Path(source), Path(output)
    check_vacant(output)
    described = read_source_config(source)
    _refuse_window(described, form, source)
    values = {**described.orthros_values(), **form.values(), "source_config": described.raw}
    if described.raw.get("tokenizer_class"):
        values["tokenizer_class"] = described.raw["tokenizer_class"]
    config = build_config(values, f"{source}/config.json")
    model = empty_model(config)
    tensors = TensorFolder(source, allow_pickle)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_parameters(
        tensors, {name: shape for name, shape in shapes.items() if not is_affine(name)}, config.tie_word_embeddings
    )
    plan = plan_shards([_planned(name, shape, tensors) for name, shape in shapes.items()], max_shard_size)

    with finished_folder(output, plan.total_bytes) as folder:
        with Progress("converting", plan.total_bytes) as progress:
            write_shards(folder, plan, progress.update)
        write_config_and_code(folder, model)
        copy_companions(source, folder)
        _write_card(folder, model.config, source, described, output, plan)
    return ToOrthros(output, plan.total_parameters, len(plan.files), described.active_window)


def write_config_and_code(folder: Path, model: OrthrosForCausalLM) -> None:
    """config.json and the modules of `orthros_train/model`, as `model.save_pretrained` writes them."""
    model.config.architectures = [type(model).__name__]
    custom_object_save(model, folder, config=cast(Any, model.config))  # annotated as a dict alone
    model.config.save_pretrained(folder)


def _refuse_window(described: SourceConfig, form: OrthrosForm, source: Path) -> None:
    window = described.active_window
    if window is not None and not form.widen_output_window:
        raise InputError(
            f"{source} attends in a sliding window of {window} tokens, fewer than its "
            f"{described.resolved.max_position_embeddings} positions, but an output stream sees everything: pass "
            f"--widen-output-window to accept that; the result then equals its source on texts of at most {window} "
            "tokens only"
        )


def _planned(name: str, shape: tuple[int, ...], tensors: TensorFolder) -> PlannedTensor:
    if not is_affine(name):
        return PlannedTensor(tensors.infos[name], partial(tensors.read, name))
    layer, _, vector = name.rsplit(".", 2)  # model.layers.N.self_attn, base_query, gain
    dtype = tensors.infos[f"{layer}.q_proj.weight"].dtype
    return PlannedTensor(TensorInfo(name, shape, dtype), partial(_identity, vector, shape, dtype))


def _identity(vector: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.ones(shape, dtype=dtype) if vector == "gain" else torch.zeros(shape, dtype=dtype)


def _write_card(
    folder: Path, config: OrthrosConfig, source: Path, described: SourceConfig, output: Path, plan: ShardPlan
) -> None:
    base_model = hub_name(described.raw.get("_name_or_path"))
    origin = f"Converted from {base_model or model_name(source)} ({described.family.causal_lm}), weight by weight."
    if described.active_window is not None:
        origin += f" The source attends in a sliding window of {described.active_window:,} tokens; this model does not."
    state = "They are still the identity: nothing has been trained since the conversion."
    if config.architecture == "transformer":
        state = "This folder is the transformer arm that such a model is compared with: the base stream alone."
    write_model_card(
        folder,
        config,
        name=model_name(output),
        origin=origin,
        state=state,
        parameters=plan.total_parameters,
        base_model=base_model,
        source=source,
    )
