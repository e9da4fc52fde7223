"""Reading a Llama-family config.json: every key accounted for, both spellings of RoPE, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import load_config, orthros_config
from orthros_train.conversion.source_config import interpret, read_source_config
from orthros_train.errors import InputError
from orthros_train.model_folder.model_parameters import build_config
from orthros_train.training.initial_model import COMPARED_OPTIONS

LLAMA3_SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
COMMON: dict[str, Any] = {
    "hidden_act": "silu", "initializer_range": 0.02, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# Files as they come with released models: older and newer spellings, with the odd keys that they carry.
RELEASED: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {
        **COMMON, "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"],
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "transformers_version": "4.31.0.dev0", "vocab_size": 32000,
        "max_length": 4096, "pad_token_id": 0,
    },
    "Llama 3.1 8B": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_SCALING, "rope_theta": 500000.0, "transformers_version": "4.42.3", "vocab_size": 128256,
    },
    "SmolLM2 135M": {
        **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536, "is_llama_config": True,
        "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False,
        "rope_scaling": None, "rope_theta": 100000, "tie_word_embeddings": True,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "vocab_size": 49152,
    },
    "Mistral 7B v0.3": {
        **COMMON, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "vocab_size": 32768,
    },
    "Qwen2.5 7B": {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584,
        "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "Qwen3 0.6B": {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
LLAMA = RELEASED["Llama 3.1 8B"]
ONE_SLIDES = ["full_attention"] * 27 + ["sliding_attention"]
SCALINGS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "beta_fast": 16.0},
    "llama3": {key: value for key, value in LLAMA3_SCALING.items() if key != "rope_type"},
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_are_understood(name: str) -> None:
    raw = RELEASED[name]
    described = interpret(raw, "config.json")
    values = described.orthros_values()
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps"):
        assert values[key] == raw[key]
    assert values["rope_parameters"]["rope_theta"] == raw.get("rope_theta", 10000.0)
    assert values["dtype"] is torch.bfloat16
    assert described.active_window is None
    config = build_config({**values, "base_window": 512}, "config.json")
    assert config.head_dim == raw.get("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
    biases = (config.attention_bias, config.attention_output_bias, config.qk_norm)
    assert biases == {"Qwen2.5 7B": (True, False, False), "Qwen3 0.6B": (False, False, True)}.get(name, (False,) * 3)


def test_a_converted_llama_fits_the_recipe_that_trains_it() -> None:
    """init_from compares these options; the recipe of continued training must meet a conversion."""
    recipe = load_config(Path(__file__).parents[2] / "configs" / "llama3.1_8b_conversion.yaml")
    wanted = orthros_config(recipe, vocab_size=128256)
    converted = build_config({**interpret(LLAMA, "config.json").orthros_values(), "base_window": 512}, "config.json")
    assert {name: getattr(converted, name) for name in COMPARED_OPTIONS} == {
        name: getattr(wanted, name) for name in COMPARED_OPTIONS
    }


@pytest.mark.parametrize("rope_type", SCALINGS)
def test_both_spellings_of_rope_are_one(rope_type: str) -> None:
    scaling = SCALINGS[rope_type]
    unscaled = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    parameters = {**scaling, "rope_theta": 77.0, "rope_type": rope_type}
    expected = interpret({**unscaled, "rope_parameters": parameters}, "new").orthros_values()["rope_parameters"]
    assert expected.items() >= parameters.items()
    if rope_type == "yarn":
        assert expected["original_max_position_embeddings"] == 131072  # as transformers fills it in
    for name in ("rope_type", "type"):
        old = {**unscaled, "rope_theta": 77.0, "rope_scaling": {**scaling, name: rope_type}}
        for raw in (old, {**old, "rope_parameters": parameters}):
            assert interpret(raw, "old").orthros_values()["rope_parameters"] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {**LLAMA3_SCALING, "factor": 32.0}}, "disagree on factor"),
        ({"rope_scaling": {**LLAMA3_SCALING, "rope_theta": 10000.0}}, "rope_theta is 500000.0, but 10000.0"),
        ({"rope_scaling": {**LLAMA3_SCALING, "type": "yarn"}}, "says rope_type 'llama3' and type 'yarn'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "has rope_type 'longrope', which Orthros does not compute"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type 'linear' needs the key 'factor'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}}, "the key 'beta_fast' (value 3)"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "rotates whole heads"),
        ({"model_type": ["llama"]}, "has model_type ['llama']; only dense models of"),
        ({"model_type": {}}, "has model_type {}; only dense models of"),
        ({"rope_scaling": {"type": []}}, "has rope_type [], which Orthros does not compute"),
        ({"rope_scaling": {"rope_type": {}}}, "has rope_type {}, which Orthros does not compute"),
        ({"rope_scaling": "linear"}, "must be null or an object"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor is 0.5: Input should be greater than or eq"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2': Input should be a valid number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor is nan: Input should be a finite"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": float("inf")}}, "factor is inf: Input should be a finite"),
        ({"rope_scaling": {**LLAMA3_SCALING, "low_freq_factor": 4.0}}, "must be less than"),
        ({"rope_scaling": {"rope_type": "default", "rope_theta": -1}, "rope_theta": None}, "rope_theta is -1, but"),
        ({"rope_theta": 0}, "rope_theta is 0, but must be a positive number"),
        ({"rope_theta": "10000"}, "rope_theta is '10000', but must be a positive number"),
        ({"sliding_window": 512}, "the key 'sliding_window' (value 512) is not known for model_type 'llama'"),
        ({"embedding_multiplier": 12.0}, "the key 'embedding_multiplier'"),
        ({"num_local_experts": 8}, "the key 'num_local_experts'"),
        ({"mlp_bias": True}, "mlp_bias is True, which cannot be converted: the FFN of an Orthros model has no biases"),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantized"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "modelling code of its own"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"rope_interleaved": True}, "rope_interleaved is True"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "only a language model, LlamaForCausalLM"),
        ({"num_attention_heads": "many"}, "refused by transformers"),
        ({"num_attention_heads": 33}, "refused by transformers"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as error:
        interpret({**LLAMA, **changes}, "folder/config.json")
    assert message in str(error.value)
    assert str(error.value).startswith("folder/config.json")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gemma2", "gpt2", "phi3", "orthros", None])
def test_other_architectures_are_refused(model_type: str | None) -> None:
    with pytest.raises(InputError, match="already" if model_type == "orthros" else "only dense models of llama, mist"):
        interpret({**LLAMA, "model_type": model_type}, "config.json")


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"num_key_value_heads": 3}, {"head_dim": 3}])
def test_a_model_that_orthros_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    values = interpret({**RELEASED["Llama 2 7B"], **changes}, "config.json")
    with pytest.raises(InputError, match="json describes a model that Orthros cannot be: "):
        build_config(values.orthros_values(), "config.json")


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("Mistral 7B v0.3", {"sliding_window": 4096}, 4096),
        ("Mistral 7B v0.3", {"sliding_window": 32768}, None),
        ("Qwen2.5 7B", {"sliding_window": 4096}, None),
        ("Qwen2.5 7B", {"sliding_window": 4096, "use_sliding_window": True}, None),  # from layer 28 of 28 on
        ("Qwen2.5 7B", {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 21}, 4096),
        ("Qwen3 0.6B", {"sliding_window": 64, "layer_types": ["sliding_attention"] * 28}, None),
        ("Qwen3 0.6B", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ONE_SLIDES}, 64),
    ],
)  # fmt: skip
def test_a_window_is_active_where_a_layer_uses_it(name: str, changes: dict[str, Any], window: int | None) -> None:
    assert interpret({**RELEASED[name], **changes}, "config.json").active_window == window


def test_a_mistral_without_a_word_on_its_window_has_the_default_one() -> None:
    raw = {key: value for key, value in RELEASED["Mistral 7B v0.3"].items() if key != "sliding_window"}
    assert interpret(raw, "config.json").active_window == 4096


def test_layers_of_another_kind_are_refused() -> None:
    layers = ["full_attention"] * 27 + ["linear_attention"]
    with pytest.raises(InputError, match="a layer of type 'linear_attention'"):
        interpret({**RELEASED["Qwen3 0.6B"], "layer_types": layers}, "config.json")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (None, "is not a folder; download the model first"),
        ({}, "holds no config.json, so it is not a model folder; name the folder"),
        ({"params.json": "{}", "consolidated.00.pth": ""}, "its maker's own format"),
        ({"config.json": '{"model_type": '}, "config.json is not valid JSON: "),
        ({"config.json": "\xff\xfe"}, "config.json is not valid JSON: "),
        ({"config.json": '{"rope_theta": NaN}'}, "config.json is not valid JSON: NaN is no number"),
        ({"config.json": '{"rope_theta": -Infinity}'}, "config.json is not valid JSON: -Infinity is no number"),
        ({"config.json": '{"rope_theta": 1e999}'}, "config.json is not valid JSON: the number 1e999 is out of range"),
        ({"config.json": "[" * 100_000}, "nested too deeply"),
        ({"config.json": "[]"}, "holds a JSON list where an object is expected"),
    ],
)
def test_what_is_no_model_folder(files: dict[str, str] | None, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    if files is not None:
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError) as error:
        read_source_config(folder)
    assert message in str(error.value)


def test_the_content_is_kept_as_it_is(tmp_path: Path) -> None:
    text = json.dumps(LLAMA)
    (tmp_path / "config.json").write_text(text)
    described = read_source_config(tmp_path)
    described.orthros_values()
    assert json.dumps(described.raw) == text
