"""A Llama-family config.json, read as transformers reads it and said again in OrthrosConfig's names.

transformers' own configuration class fills in the defaults of keys that the file lacks and settles both spellings of
RoPE (`rope_theta` + `rope_scaling`, and `rope_parameters`), so the result is the model that transformers would build.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from orthros_train.conversion.config_keys import check_keys
from orthros_train.conversion.families import FAMILIES, Family
from orthros_train.errors import InputError, damaged_model_errors
from orthros_train.model_folder.json_files import read_json_object

# Same name and meaning in OrthrosConfig.
SHARED_OPTIONS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "dtype",
)


@dataclass(frozen=True)
class SourceConfig:
    """A configuration of the Llama family, every key of it accounted for.

    Attributes:
        raw: the content of config.json.
        family: the architecture that it names.
        resolved: transformers' reading of it.
    """

    raw: dict[str, Any]
    family: Family
    resolved: PreTrainedConfig

    def orthros_values(self) -> dict[str, Any]:
        """Keyword arguments of the OrthrosConfig with the same weights; window, sinks and affines are not the source's.

        RoPE is in one spelling: `rope_parameters` with `rope_type`, `rope_theta` and the keys that are set.
        """
        family, resolved = self.family, self.resolved
        bias = bool(getattr(resolved, "attention_bias", False))
        rope = {name: value for name, value in resolved.rope_parameters.items() if value is not None}
        return {
            **{name: getattr(resolved, name) for name in SHARED_OPTIONS},
            "head_dim": getattr(resolved, "head_dim", None),
            "rope_parameters": {k: v for k, v in rope.items() if k not in ("type", "partial_rotary_factor")},
            "attention_bias": bias if family.qkv_bias is None else family.qkv_bias,
            "attention_output_bias": bias if family.output_bias is None else family.output_bias,
            "qk_norm": family.qk_norm,
        }

    @property
    def active_window(self) -> int | None:
        """The sliding window that the source attends in, itself included; None if it sees every position it knows."""
        window: int | None = getattr(self.resolved, "sliding_window", None)
        layer_types = getattr(self.resolved, "layer_types", None)
        if window is None or (layer_types is not None and "sliding_attention" not in layer_types):
            return None
        return window if window < self.resolved.max_position_embeddings else None


def read_source_config(folder: Path) -> SourceConfig:
    """The configuration of a model folder.

    Raises:
        InputError: no such folder, no config.json in it, or one that `interpret` refuses.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder; download the model first, for example with "
            "`hf download ORGANIZATION/MODEL --local-dir DIR`, and name that folder"
        )
    path = folder / "config.json"
    if not path.is_file():
        meta = (folder / "params.json").is_file() or any(folder.glob("consolidated.*"))
        hint = (
            "it seems to be in its maker's own format; take the Hugging Face version of the model"
            if meta
            else "name the folder that holds config.json, the weights and the tokenizer"
        )
        raise InputError(f"{folder} holds no config.json, so it is not a model folder; {hint}")
    return interpret(read_json_object(path), str(path))


def interpret(raw: Any, where: str) -> SourceConfig:
    """Check and resolve the content of a config.json; `where` names the file in messages.

    Raises:
        InputError: an architecture other than the supported ones, a key that is not accounted for, or values that
            transformers refuses or that contradict one another.
    """
    if not isinstance(raw, dict):
        raise InputError(f"{where} is {raw!r}, but must be the object that a config.json holds")
    model_type = raw.get("model_type")
    if model_type == "orthros":
        raise InputError(f"{where} is an Orthros model already; --to llama is the way back")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(
            f"{where} has model_type {model_type!r}; only dense models of {', '.join(FAMILIES)} can be converted"
        )
    family = FAMILIES[model_type]
    architectures = raw.get("architectures") or [family.causal_lm]
    if architectures != [family.causal_lm]:
        raise InputError(
            f"{where} has architectures {architectures!r}; only a language model, {family.causal_lm}, can be converted"
        )
    check_keys(raw, family, where)
    try:
        resolved = AutoConfig.for_model(**_one_rope_spelling(raw, where))
    except damaged_model_errors() as error:
        raise InputError(f"{where} is refused by transformers: {error.__cause__ or error}") from error
    for layer_type in getattr(resolved, "layer_types", None) or ():
        if layer_type not in ("full_attention", "sliding_attention"):
            raise InputError(f"{where} has a layer of type {layer_type!r}, which cannot be converted")
    return SourceConfig(raw, family, resolved)


def _one_rope_spelling(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy without what is said twice. Raises InputError where the two spellings of RoPE contradict each other."""
    new, old, theta = raw.get("rope_parameters"), raw.get("rope_scaling"), raw.get("rope_theta")
    if new and old:
        for key, value in old.items():
            name = "rope_type" if key == "type" else key
            if value is not None and new.get(name, new.get("type") if name == "rope_type" else None) != value:
                raise InputError(f"{where}: rope_parameters and rope_scaling disagree on {name}; remove the wrong one")
    inner = (new or old or {}).get("rope_theta")
    if theta is not None and inner is not None and theta != inner:
        raise InputError(f"{where}: rope_theta is {theta}, but {inner} inside the RoPE object; remove the wrong one")
    dropped = ("rope_scaling",) if new else ()
    return copy.deepcopy({key: value for key, value in raw.items() if key not in dropped})  # transformers edits it
