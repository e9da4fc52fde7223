"""What is known of each key that a Llama-family config.json may hold.

A key is read by the conversion, or harmless because it does not touch what the model computes, or harmless at one
value only. Any other is an error that names it: a key that nobody reads is how a conversion goes wrong silently.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from transformers import GenerationConfig

from orthros_train.config.model import ROPE_SCALING_KEYS, RopeScalingSection
from orthros_train.conversion.families import Family
from orthros_train.errors import InputError

READ = frozenset(
    {
        "architectures", "model_type", "dtype", "torch_dtype",
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "initializer_range", "tie_word_embeddings",
        "max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling",
        "pad_token_id", "bos_token_id", "eos_token_id", "use_cache", "tokenizer_class",
    }
)  # fmt: skip

# Records, hints of libraries, labels of other tasks, and settings of the source's own training or execution.
HARMLESS = frozenset(
    {
        "_name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version", "_from_model_config",
        "is_llama_config",
        "unsloth_fixed", "unsloth_version", "transformers.js_config", "task_specific_params", "finetuning_task",
        "attention_dropout", "pretraining_tp", "torchscript", "return_dict", "output_attentions",
        "output_hidden_states", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
        "_attn_implementation_internal", "_flash_attn_2_enabled", "prefix", "problem_type", "num_labels", "id2label",
        "label2id", "unk_token_id", "neftune_noise_alpha",
    }
)  # fmt: skip

# Harmless at this value; at another the source computes what Orthros does not.
HARMLESS_AT: dict[str, Any] = {
    "add_cross_attention": False,
    "auto_map": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}

_REASONS = {
    "auto_map": "the folder brings modelling code of its own, so it need not be the architecture that it names",
    "mlp_bias": "the FFN of an Orthros model has no biases",
    "partial_rotary_factor": "an Orthros model rotates whole heads",
    "quantization_config": "the weights are quantized: dequantize the model and save it in bf16 first",
}


def check_keys(raw: dict[str, Any], family: Family, where: str) -> None:
    """Account for every key of a config.json.

    Args:
        raw: the file's content.
        family: the architecture that it names.
        where: the file, for the message.

    Raises:
        InputError: a key that is unknown, or known and set to what Orthros cannot follow.
    """
    generation = GenerationConfig().to_dict()
    for key, value in raw.items():
        if key in HARMLESS_AT:
            if value != HARMLESS_AT[key]:
                reason = _REASONS.get(key, "Orthros has no counterpart")
                raise InputError(f"{where}: {key} is {value!r}, which cannot be converted: {reason}")
        elif key not in READ and key not in HARMLESS and key not in family.own_keys and key not in generation:
            raise InputError(
                f"{where}: the key {key!r} (value {value!r}) is not known for model_type {family.model_type!r}; if it "
                "does not change what the model computes, remove it from a copy of the file"
            )
    _check_theta(raw, where)
    for key in ("rope_parameters", "rope_scaling"):
        if raw.get(key) is not None:
            _check_rope_keys(raw[key], f"{where}: {key}")


def _check_rope_keys(rope: Any, where: str) -> None:
    if not isinstance(rope, dict):
        raise InputError(f"{where} is {rope!r}, but must be null or an object with a rope_type")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in ROPE_SCALING_KEYS:
        raise InputError(
            f"{where} has rope_type {rope_type!r}, which Orthros does not compute; it knows "
            f"{', '.join(ROPE_SCALING_KEYS)}"
        )
    if rope.get("type", rope_type) != rope_type:
        raise InputError(f"{where} says rope_type {rope_type!r} and type {rope['type']!r}; remove the wrong one")
    needed, optional = ROPE_SCALING_KEYS[rope_type]
    for key, value in rope.items():
        if key == "partial_rotary_factor" and value not in (None, 1.0):
            raise InputError(f"{where}: {key} is {value!r}, which cannot be converted: {_REASONS[key]}")
        known = key in ("rope_type", "type", "rope_theta", "partial_rotary_factor", *needed, *optional)
        if not known and value is not None:
            raise InputError(f"{where}: the key {key!r} (value {value!r}) is not known for rope_type {rope_type!r}")
    for key in needed:
        if rope.get(key) is None and key != "original_max_position_embeddings":  # transformers fills that one in
            raise InputError(f"{where}: rope_type {rope_type!r} needs the key {key!r}")
    _check_theta(rope, where)
    _check_rope_values({"rope_type": rope_type, **{key: rope.get(key) for key in (*needed, *optional)}}, where)


def _check_theta(values: dict[str, Any], where: str) -> None:
    theta = values.get("rope_theta")
    if theta is not None and (isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0):
        raise InputError(f"{where}: rope_theta is {theta!r}, but must be a positive number")


def _check_rope_values(scaling: dict[str, Any], where: str) -> None:
    """The same bounds as in a run's configuration: transformers itself only warns."""
    if "original_max_position_embeddings" in scaling and scaling["original_max_position_embeddings"] is None:
        scaling["original_max_position_embeddings"] = 1  # transformers fills it in
    try:
        RopeScalingSection.model_validate(scaling)
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"]:
            name = str(first["loc"][0])
            raise InputError(f"{where}: {name} is {scaling.get(name)!r}: {first['msg']}") from error
        raise InputError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error
