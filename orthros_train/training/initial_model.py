"""The model a run starts from: drawn from the seed, or read from a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from orthros_train.config import Config
from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.parallel.quiet_deepspeed import silenced
from orthros_train.training.optimizer import AFFINES

# What must agree with the folder's config.json. Window, sinks and kernel may differ: one trains to adapt to them.
COMPARED_OPTIONS = (
    "architecture",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "tie_word_embeddings",
    "attention_bias",
    "attention_output_bias",
    "qk_norm",
)


def build_model(config: Config, model_config: OrthrosConfig, factory: LayerFactory | None = None) -> OrthrosForCausalLM:
    """The fp32 model at step 0, the same on every rank and in every layout.

    Raises:
        InputError: `init_from` is no Orthros folder, or one of another model than the configuration describes.
    """
    if config.init_from is None:
        model = OrthrosForCausalLM(model_config, factory)
        model.reset_parameters(config.train.seed)
        return model
    folder = Path(config.init_from)
    if not (folder / "config.json").is_file():
        raise InputError(f"init_from {folder} has no config.json; give a Hugging Face folder of an Orthros model")
    try:
        source = OrthrosConfig.from_pretrained(folder)
        _refuse_other_model(folder, source, model_config)
        if hasattr(source, "source_config"):  # of the model that was converted: an export needs it for the way back
            model_config.source_config = source.source_config
        with silenced():  # a progress bar a rank
            loaded: Any = OrthrosForCausalLM.from_pretrained(
                folder, config=model_config, dtype=torch.float32, output_loading_info=True
            )
    except damaged_model_errors() as error:
        raise InputError(f"init_from {folder} cannot be read: {error}") from error
    model, info = loaded
    missing = [name for name in info["missing_keys"] if name.split(".")[-2] not in AFFINES]
    wrong = [*missing, *info["unexpected_keys"], *(key for key, *_ in info["mismatched_keys"])]
    if wrong:
        raise InputError(f"init_from {folder} does not fit the model: {wrong[0]} is missing, unknown or misshapen")
    return model


def _refuse_other_model(folder: Path, source: OrthrosConfig, wanted: OrthrosConfig) -> None:
    for option in COMPARED_OPTIONS:
        theirs, ours = getattr(source, option), getattr(wanted, option)
        if theirs != ours:
            raise InputError(f"init_from {folder} has {option} {theirs!r}, this config {ours!r}; make them agree")
