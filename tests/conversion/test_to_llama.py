"""The way back: refused once affines are trained, and a right config.json whatever has happened since."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from orthros_train.conversion.to_llama import llama_config, to_llama
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM
from tests.conversion.sources import SHAPE, edit_json, load, save_source, save_tokenizer
from tests.model.tiny import tiny_config

GAIN = "model.layers.1.self_attn.base_query.gain"
SHIFT = "model.layers.2.self_attn.output_query.shift"


@pytest.fixture
def orthros(tmp_path: Path) -> Path:
    to_orthros(save_source(tmp_path / "source"), tmp_path / "orthros", OrthrosForm(base_window=64))
    return tmp_path / "orthros"


@pytest.mark.parametrize(("name", "change"), [(GAIN, 0.25), (GAIN, -0.25), (SHIFT, -0.25)])
def test_trained_affines_are_dropped_on_request_only(name: str, change: float, orthros: Path) -> None:
    tensors = load_file(orthros / "model.safetensors")
    tensors[name][3] += change
    tensors[SHIFT][0] += 0.125
    save_file(tensors, orthros / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=rf"\({name} is 0\.25 away from the identity\).*--drop-affines"):
        to_llama(orthros, orthros.parent / "back")
    assert not (orthros.parent / "back").exists()
    assert to_llama(orthros, orthros.parent / "back", drop_affines=True).dropped_deviation == 0.25
    source, back = (load_file(orthros.parent / each / "model.safetensors") for each in ("source", "back"))
    assert source.keys() == back.keys()
    assert all(torch.equal(source[name], tensor) for name, tensor in back.items())


def test_training_without_affines_leads_back(orthros: Path) -> None:
    """A fine-tuned conversion keeps its source's config.json, and its own weights."""
    model = OrthrosForCausalLM.from_pretrained(orthros)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.add_(1)
    model.save_pretrained(orthros.parent / "tuned")
    to_llama(orthros.parent / "tuned", orthros.parent / "back")
    expected = json.loads((orthros.parent / "source" / "config.json").read_text())
    assert json.loads((orthros.parent / "back" / "config.json").read_text()) == expected
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert (load(orthros.parent / "back")(ids).logits - model.eval()(ids).logits).abs().max() <= 1e-4


def test_the_tokenizer_goes_back_too(orthros: Path) -> None:
    save_tokenizer(orthros)
    to_llama(orthros, orthros.parent / "back")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (orthros.parent / "back" / name).read_bytes() == (orthros / name).read_bytes()
    assert not list((orthros.parent / "back").glob("*.py"))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_model_that_has_changed_gets_a_new_config(family: str, tmp_path: Path) -> None:
    to_orthros(save_source(tmp_path / "source", family), tmp_path / "orthros", OrthrosForm(base_window=64))
    model = OrthrosForCausalLM.from_pretrained(tmp_path / "orthros")
    model.resize_token_embeddings(70)
    model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    model.to(torch.bfloat16).save_pretrained(tmp_path / "grown")
    to_llama(tmp_path / "grown", tmp_path / "back")
    written = AutoConfig.from_pretrained(tmp_path / "back")
    original = AutoConfig.from_pretrained(tmp_path / "source")
    changed = {"vocab_size": 70, "rope_parameters": model.config.rope_parameters, "dtype": torch.bfloat16}
    assert type(written) is type(original)
    for name, value in original.to_dict().items():
        if name not in ("_name_or_path", "transformers_version", "dtype", "rope_parameters"):
            assert getattr(written, name) == changed.get(name, value), name
    assert written.rope_parameters == changed["rope_parameters"]
    assert written.dtype == torch.bfloat16
    ids = torch.arange(69)[None]
    grown = AutoModelForCausalLM.from_pretrained(tmp_path / "grown", dtype=torch.float32).eval()
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():  # the window of 64 is 5 tokens short of the text
        assert (grown(ids).logits - back(ids).logits)[:, :64].abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("options", "model_type"),
    [
        ({}, "llama"),
        ({"attention_bias": True}, "llama"),
        ({"attention_bias": True, "attention_output_bias": False}, "qwen2"),
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": True, "attention_bias": True}, "qwen3"),
    ],
)
def test_a_model_trained_from_scratch_has_a_llama_form(
    options: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    model = OrthrosForCausalLM(tiny_config(architecture="transformer", base_window=None, head_dim=16, **options)).eval()
    model.reset_parameters(seed=0)
    model.save_pretrained(tmp_path / "arm")
    to_llama(tmp_path / "arm", tmp_path / "back")
    llama = load(tmp_path / "back")
    assert llama.config.model_type == model_type
    ids = torch.arange(60)[None]
    with torch.no_grad():
        assert (llama(ids).logits - model(ids).logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "options",
    [
        {"attention_bias": False, "attention_output_bias": True},
        {"attention_bias": True, "attention_output_bias": False, "qk_norm": True},
    ],
)
def test_biases_that_no_family_has(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="this model has no form but Orthros"):
        llama_config(OrthrosConfig(**SHAPE, **options), "folder")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "has model_type 'llama'; only an Orthros model has a way back"),
        ({"source_config": ["llama"]}, "config.json is ['llama'], but must be the object that a config.json holds"),
        ({"source_config": "llama"}, "config.json is 'llama', but must be the object"),
        ({"num_hidden_layers": 4}, "lacks the tensor model.layers.2.self_attn.base_query.gain"),
        ({"num_key_value_heads": 3}, "describes a model that Orthros cannot be"),
        (
            {"architecture": "transformer", "query_affine": "none"},
            "a transformer arm with a sliding window (base_window",
        ),
    ],
)
def test_folders_without_a_way_back(changes: dict[str, Any], message: str, orthros: Path) -> None:
    edit_json(orthros / "config.json", **changes)
    with pytest.raises(InputError) as error:
        to_llama(orthros, orthros.parent / "back")
    assert message in str(error.value)
    assert not (orthros.parent / "back").exists()


@pytest.mark.parametrize("shape", [(61 * 32,), (61,), (61, 32, 1), (32, 61), ()])
def test_a_tied_head_of_another_shape(shape: tuple[int, ...], tmp_path: Path) -> None:
    """A tied model may repeat its embedding as the head, but nothing else."""
    source = save_source(tmp_path / "source", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(shape)}, source / "model.safetensors")
    with pytest.raises(InputError, match=r"says tie_word_embeddings, but lm_head.weight and .* differ"):
        to_orthros(source, tmp_path / "orthros", OrthrosForm(8))
