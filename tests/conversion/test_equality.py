"""A conversion is its source (invariant 1), and back again it is the source's bits (invariant 10)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from orthros_train.conversion.to_llama import to_llama
from orthros_train.model import OrthrosForCausalLM
from tests.conversion.sources import edit_json, save_source

LENGTH = 100  # beyond the 64 positions of the sources and the 32 that scaled RoPE started from
WIDE = OrthrosForm(base_window=LENGTH)

LINEAR = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
SHARDED = {"max_shard_size": "20kB"}

CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama sharded tied": {"tie_word_embeddings": True, **SHARDED},
    "llama multi-head biased": {"num_key_value_heads": 4, "attention_bias": True},
    "llama multi-query head_dim": {"num_key_value_heads": 1, "head_dim": 16},
    "llama linear": {"rope_parameters": LINEAR},
    "llama dynamic": {"rope_parameters": DYNAMIC},
    "llama yarn tied": {"rope_parameters": {**YARN, "beta_fast": 16.0}, "tie_word_embeddings": True},
    "llama llama3 sharded": {"rope_parameters": LLAMA3, **SHARDED},
    "llama bf16": {"dtype": torch.bfloat16},
    "llama fp16 sharded": {"dtype": torch.float16, **SHARDED},
    "mistral head_dim": {"head_dim": 16},
    "mistral idle window": {"sliding_window": 64},
    "qwen2 sharded": SHARDED,
    "qwen2 tied yarn": {"tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen2 idle window": {"sliding_window": 16, "use_sliding_window": False},
    "qwen3 head_dim": {"head_dim": 16},
    "qwen3 tied biased sharded": {"tie_word_embeddings": True, "attention_bias": True, **SHARDED},
}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def logits_of(folder: Path, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(**inputs).logits
    return logits


def token_ids(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 61, (rows, columns), generator=torch.Generator().manual_seed(0))


def assert_equal_logits(folder: Path, source: Path, **inputs: torch.Tensor) -> None:
    actual, expected = logits_of(folder, **inputs), logits_of(source, **inputs)
    assert float((actual - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("case", CASES)
def test_a_conversion_equals_its_source_and_leads_back_to_it(case: str, tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", case.split(maxsplit=1)[0], **CASES[case])
    assert ("sharded" in case) == (len(list(source.glob("*.safetensors"))) > 1)
    to_orthros(source, tmp_path / "orthros", WIDE)
    back = to_llama(tmp_path / "orthros", tmp_path / "back")

    assert isinstance(AutoModelForCausalLM.from_pretrained(tmp_path / "orthros"), OrthrosForCausalLM)
    length = 64 if "idle window" in case else LENGTH  # beyond its positions such a source, too, drops history
    assert_equal_logits(tmp_path / "orthros", source, input_ids=token_ids(2, length))

    original, between, returned = (tensors_of(tmp_path / name) for name in ("source", "orthros", "back"))
    assert returned.keys() == original.keys()
    assert between.keys() == original.keys() | {name for name in between if "_query." in name}
    for name, tensor in original.items():
        for other in (between[name], returned[name]):
            assert other.dtype == tensor.dtype
            assert torch.equal(other, tensor)
    assert back.dropped_deviation == 0
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_the_older_spelling_comes_back_as_it_was(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "qwen2", rope_parameters=YARN)
    scaling = {"type": "yarn", **{key: YARN[key] for key in ("factor", "original_max_position_embeddings")}}
    older = {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling, "torch_dtype": "float32"}
    edit_json(source / "config.json", remove=("rope_parameters", "dtype", "layer_types"), **older)
    to_orthros(source, tmp_path / "orthros", WIDE)
    assert_equal_logits(tmp_path / "orthros", source, input_ids=token_ids(2, LENGTH))
    to_llama(tmp_path / "orthros", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(("family", "factor"), [("3.1", 8.0), ("3.2", 32.0)])
def test_rope_of_llama_3_reaches_past_its_original_positions(family: str, factor: float, tmp_path: Path) -> None:
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192}
    source = save_source(tmp_path / "source", max_position_embeddings=131072, head_dim=32, rope_parameters=rope)
    to_orthros(source, tmp_path / "orthros", WIDE)
    for first in (8180, 100_000):
        positions = torch.arange(first, first + 40)[None]
        assert_equal_logits(tmp_path / "orthros", source, input_ids=token_ids(1, 40), position_ids=positions)


def test_beyond_the_window_a_conversion_is_another_model(tmp_path: Path) -> None:
    """The tests above would pass if windows were ignored; within this one the two still agree."""
    source = save_source(tmp_path / "source")
    to_orthros(source, tmp_path / "orthros", OrthrosForm(base_window=8))
    ids = token_ids(1, 30)
    difference = (logits_of(tmp_path / "orthros", input_ids=ids) - logits_of(source, input_ids=ids)).abs().amax(-1)[0]
    assert float(difference[:8].max()) <= 1e-5 * 10
    assert float(difference[12:].min()) > 1e-3


def test_the_transformer_arm_is_the_source_itself(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "qwen2")
    to_orthros(source, tmp_path / "arm", OrthrosForm(base_window=None, architecture="transformer"))
    assert tensors_of(tmp_path / "arm").keys() == tensors_of(source).keys()
    assert_equal_logits(tmp_path / "arm", source, input_ids=token_ids(2, LENGTH))
    to_llama(tmp_path / "arm", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "options"),
    [("mistral", {}), ("qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
    ids=["mistral", "qwen2"],
)
def test_a_widened_window_is_equal_within_it(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", family, sliding_window=24, **options)
    written = to_orthros(source, tmp_path / "orthros", OrthrosForm(base_window=64, widen_output_window=True))
    assert written.source_window == 24
    ids = token_ids(1, 48)
    difference = (logits_of(tmp_path / "orthros", input_ids=ids) - logits_of(source, input_ids=ids)).abs().amax(-1)[0]
    assert float(difference[:24].max()) <= 1e-4
    assert float(difference[24:].min()) > 1e-3
    to_llama(tmp_path / "orthros", tmp_path / "back")
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())
