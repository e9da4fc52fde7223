"""Folders, checkpoints and Llamas become the same kind of model, with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from evaluation import cache_check, run, ttft
from evaluation.benchmarking.models import add_model_options
from evaluation.lm_eval_model import OrthrosLM
from evaluation.model_folder import load_model
from evaluation.model_source import load_evaluated_model
from orthros_train.command_line import CommandParser
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training import checkpoint_folders
from tests.distributed import run_distributed
from tests.evaluation.tiny_models import save_llama, save_orthros
from tests.training.conftest import corpus  # noqa: F401  a fixture
from tests.training.small_runs import run as run_training
from tests.training.small_runs import small_config

IDS = torch.arange(60)[None]


def test_a_checkpoint_is_its_export(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    assert run_training(small_config(tmp_path / "run", corpus), 1) == 0
    evaluated = load_evaluated_model(tmp_path / "run")
    assert evaluated.kind == "checkpoint"
    assert Path(evaluated.source).name.startswith("step_")
    export_hf(tmp_path / "run", tmp_path / "export")
    for dtype in ("auto", "bf16", "float64"):
        exported = load_model(tmp_path / "export", dtype=dtype)
        model = load_evaluated_model(tmp_path / "run", dtype=dtype).model
        assert model.dtype == exported.dtype
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, exported(IDS).logits)
        assert model.generation_config.to_dict() == exported.generation_config.to_dict()
        assert not model.training
    assert evaluated.tokenizer.decode(list(b"text")) == "text"


def test_ranks_load_the_same_checkpoint_of_a_run_in_progress(tmp_path: Path, corpus: Path) -> None:  # noqa: F811
    """Rank 0 looks before the newest is there, rank 1 after."""
    config = small_config(tmp_path / "run", corpus, checkpoint__interval_steps=3)
    assert run_training(config, 1) == 0
    newest, before = checkpoint_folders.checkpoint_folders(tmp_path / "run" / "checkpoints")[:2]

    def work() -> str:
        torch.set_num_threads(1)
        if torch.distributed.get_rank() == 0:
            seen = checkpoint_folders.checkpoint_folders
            checkpoint_folders.checkpoint_folders = lambda folder: seen(folder)[1:]
        return OrthrosLM(str(tmp_path / "run")).evaluated.source

    assert newest != before
    assert run_distributed(work, 2) == [str(before)] * 2


def test_what_no_rank_can_load_is_one_line_on_each(tmp_path: Path) -> None:
    def work() -> str:
        with pytest.raises(InputError, match="no checkpoint in") as refused:
            OrthrosLM(str(tmp_path))
        return str(refused.value)

    assert len(set(run_distributed(work, 2))) == 1


@pytest.mark.parametrize("save", [save_orthros, save_llama])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("no room"), "cpu has too little memory for the model in .*; use --dtype bf16"),
        (RuntimeError("device lost"), "cannot load the model in .*: device lost"),
    ],
)
def test_a_device_that_cannot_take_the_model_is_named(
    save: Callable[[Path], Path], error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    folder = save(tmp_path / "model")
    monkeypatch.setattr(OrthrosForCausalLM, "to", refuse)
    with pytest.raises(InputError, match=message):
        load_evaluated_model(folder)


def test_a_llama_is_its_own_model_and_its_conversion(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    theirs = LlamaForCausalLM.from_pretrained(folder).eval()
    transformer = load_evaluated_model(folder).model
    orthros = load_evaluated_model(folder, base_window=16, base_sinks=2).model
    to_orthros(folder, tmp_path / "converted", OrthrosForm(base_window=16, base_sinks=2))
    converted = load_model(tmp_path / "converted")
    with torch.no_grad():
        assert (transformer(IDS).logits - theirs(IDS).logits).abs().max() < 1e-5
        assert torch.equal(orthros(IDS).logits, converted(IDS).logits)


def test_dtypes(tmp_path: Path) -> None:
    folder = save_orthros(tmp_path / "model")
    assert load_evaluated_model(folder).model.dtype == torch.float32
    assert load_evaluated_model(folder, dtype="bf16").model.dtype == torch.bfloat16
    assert load_evaluated_model(save_llama(tmp_path / "llama"), dtype="bf16").model.dtype == torch.bfloat16


@pytest.mark.parametrize("save", [save_orthros, save_llama])
def test_a_dtype_is_known_by_our_name_and_by_torchs(save: Callable[[Path], Path], tmp_path: Path) -> None:
    """lm-eval's command line takes torch's names, and results.json records them."""
    folder = save(tmp_path / "model")
    for ours, theirs in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16"), ("fp64", "float64")):
        for name in (ours, theirs):
            model = load_evaluated_model(folder, dtype=name).model
            assert model.dtype == getattr(torch, theirs)
            assert model(IDS).logits.isfinite().all()
    for unknown in ("int8", "Float32", "", "float"):
        with pytest.raises(InputError, match=r"dtype '\w*' is not known; give one of auto, fp32 \(float32\), bf16"):
            load_evaluated_model(folder, dtype=unknown)


def _benchmark() -> CommandParser:
    parser = CommandParser("", "")
    add_model_options(parser)
    return parser


@pytest.mark.parametrize("build", [run.build_parser, ttft.build_parser, cache_check.build_parser, _benchmark])
def test_every_command_takes_both_names_of_a_dtype(build: Callable[[], CommandParser]) -> None:
    needed = ["--output", "x", "--model", "m"] if build is not _benchmark else ["--output", "x"]
    for name in ("fp32", "float32"):
        assert build().parse_args([*needed, "--dtype", name]).dtype == "fp32"
    assert build().parse_args([*needed, "--dtype", "bfloat16"]).dtype == "bf16"
    with pytest.raises(InputError, match="argument --dtype: invalid choice: 'int8'"):
        build().parse_args([*needed, "--dtype", "int8"])


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'))
    with pytest.raises(InputError, match=r"do not fit its config\.json: model\.layers\.3\..* is missing"):
        load_evaluated_model(folder)
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="cannot load the model"):
        load_evaluated_model(folder)


def test_a_llama_with_a_sliding_window_stays_what_it_is(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    config = (folder / "config.json").read_text()
    mistral = config.replace('"llama"', '"mistral"').replace("LlamaForCausalLM", "MistralForCausalLM")
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        mistral = "\n".join(line for line in mistral.splitlines() if f'"{key}"' not in line)
    (folder / "config.json").write_text(mistral.replace("{", '{\n  "sliding_window": 8,', 1))
    model = load_evaluated_model(folder).model
    assert (model.config.architecture, model.config.base_window) == ("transformer", 8)
    with pytest.raises(InputError, match="--widen-output-window"):
        load_evaluated_model(folder, base_window=16)
