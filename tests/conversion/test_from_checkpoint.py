"""An exported checkpoint holds the fp32 master weights of whatever layout saved it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training.checkpoint_folders import HF_FOLDER, find_checkpoint
from orthros_train.training.manifest import read_manifest
from orthros_train.training.state_files import SavedState
from tests.training.small_runs import MODEL, run, small_config

TOKENS = torch.arange(40)[None]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of two ranks, ZeRO-3, bf16, with tied embeddings."""
    folder = tmp_path_factory.mktemp("export") / "run"
    model = {**MODEL, "tie_word_embeddings": True}
    assert run(small_config(folder, corpus, model=model, precision="bf16", parallel__zero_stage=3), 2) == 0
    return folder


def test_export_loads_everywhere(finished: Path, tmp_path: Path) -> None:
    folder = export_hf(finished, tmp_path / "model")
    ours = OrthrosForCausalLM.from_pretrained(folder).eval()
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        assert torch.equal(ours(TOKENS).logits, theirs(TOKENS).logits)
    assert AutoTokenizer.from_pretrained(folder).decode(list(b"text")) == "text"


def test_weights_are_the_master_weights(finished: Path, tmp_path: Path) -> None:
    """Bitwise, and finer than the bf16 weights that the layers worked with."""
    weights = load_file(export_hf(finished, tmp_path / "model") / "model.safetensors")
    checkpoint = find_checkpoint(finished)
    masters = SavedState(checkpoint, read_manifest(checkpoint))
    assert weights.keys() == masters.parameters.keys()
    assert all(torch.equal(tensor, masters.weight(name)) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in weights.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_dtype_casts_the_master_weights(finished: Path, tmp_path: Path, dtype: str) -> None:
    wide = load_file(export_hf(finished, tmp_path / "wide") / "model.safetensors")
    narrow = load_file(export_hf(finished, tmp_path / "narrow", dtype) / "model.safetensors")
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    assert all(torch.equal(narrow[name], tensor.to(wanted)) for name, tensor in wide.items())
    assert OrthrosForCausalLM.from_pretrained(tmp_path / "narrow", dtype="auto").dtype == wanted


def test_nothing_appears_before_it_is_complete(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: OrthrosForCausalLM, folder: Path) -> None:
        assert folder.name != "model"
        raise OSError("disk full")

    monkeypatch.setattr(OrthrosForCausalLM, "save_pretrained", fail)
    with pytest.raises(InputError, match=r"cannot write .*disk full"):
        export_hf(finished, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_an_empty_output_folder_may_exist(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    assert (export_hf(finished, tmp_path / "model") / "config.json").is_file()


def test_what_a_conversion_knew_of_its_source_survives_training(finished: Path, corpus: Path, tmp_path: Path) -> None:
    """A run from a converted folder exports the source's config.json, which the way back needs."""
    folder = export_hf(finished, tmp_path / "converted")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "source_config": {"model_type": "mistral"}}))
    model = {**MODEL, "tie_word_embeddings": True}
    trained = small_config(tmp_path / "run", corpus, model=model, init_from=str(folder), train__steps=1, schedule={})
    assert run(trained) == 0
    exported = json.loads((export_hf(tmp_path / "run", tmp_path / "model") / "config.json").read_text())
    assert exported["source_config"] == {"model_type": "mistral"}


def test_generation_knows_where_a_text_ends(finished: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(export_hf(finished, tmp_path / "model"), trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)
    assert model.generation_config.eos_token_id is not None


def test_how_a_conversion_generates_survives_training(finished: Path, corpus: Path, tmp_path: Path) -> None:
    """The settings of the model that a run starts from, its ends of a text besides the tokenizer's own."""
    start = export_hf(finished, tmp_path / "start")
    own = json.loads((start / "config.json").read_text())
    ends = [own["eos_token_id"], 7, 9]
    (start / "config.json").write_text(json.dumps({**own, "eos_token_id": ends}))
    # transformers itself refuses to write a temperature without sampling, as models of the hub have it
    settings = {"eos_token_id": ends, "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.40.0"}
    (start / "generation_config.json").write_text(json.dumps(settings))
    model = {**MODEL, "tie_word_embeddings": True}
    trained = small_config(tmp_path / "run", corpus, model=model, init_from=str(start), train__steps=1, schedule={})
    assert run(trained) == 0
    exported = export_hf(tmp_path / "run", tmp_path / "model")
    for folder in (find_checkpoint(tmp_path / "run") / HF_FOLDER, exported):
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == ends
        written = json.loads((folder / "generation_config.json").read_text())
        assert {name: written[name] for name in settings} == settings
    loaded = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    assert loaded.generation_config.eos_token_id == ends
    assert loaded.generation_config.temperature == 0.6


def test_the_folder_carries_a_card_and_readable_weights(finished: Path, tmp_path: Path) -> None:
    folder = export_hf(finished, tmp_path / "model")
    assert "2610.13735" in (folder / "README.md").read_text()
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o666 & folder.stat().st_mode
