"""The loop as a whole: it learns, validates exactly, starts from a folder, and runs under a real launcher."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import Config, config_to_yaml
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.data import PretrainingData, collate, load_tokenizer
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training import loop
from tests.training.small_runs import MODEL, WORDS, checkpoint_names, losses, metrics, run, small_config, write_corpus

ARMS = {"orthros": {**MODEL, "hidden_size": 64, "intermediate_size": 128}}
ARMS["transformer"] = {**ARMS["orthros"], "architecture": "transformer", "base_window": None}


@pytest.mark.parametrize("arm", ARMS)
def test_memorizes_a_fixed_batch(tmp_path: Path, arm: str) -> None:
    """An epoch of one global batch: every step sees the same eight rows, and their loss goes to nothing."""
    draw = random.Random(1)
    corpus = write_corpus(tmp_path, [" ".join(draw.choices(WORDS, k=12)) for _ in range(6)])
    tokens = sum(len(line) + 1 for line in (tmp_path / "text.txt").read_text().splitlines())
    config = small_config(
        tmp_path / "run",
        corpus,
        model=ARMS[arm],
        data__split=[1.0, 0.0, 0.0],
        train__steps=120,
        train__micro_batch_size=8,
        train__sequence_length=(tokens - 1) // 8,
        schedule__warmup_steps=10,
    )
    assert run(config) == 0
    assert losses(config)[0] > 5
    assert losses(config)[-1] < 0.05
    assert "validation_loss" not in metrics(config)[-1]


def test_validation_loss_is_the_mean_over_labels_whatever_the_ranks(tmp_path: Path, corpus: Path) -> None:
    """Seven samples of unequal label counts on 1 and 2 ranks, against the exported model on all of them at once."""
    found = []
    for ranks, zero_stage, micro in ((1, 1, 2), (2, 1, 2), (2, 3, 1)):
        config = small_config(
            tmp_path / f"run{len(found)}",
            corpus,
            parallel__zero_stage=zero_stage,
            train__micro_batch_size=micro,
            evaluation__samples=7,
        )
        assert run(config, ranks) == 0
        found.append(metrics(config)[-1]["validation_loss"])
    model = OrthrosForCausalLM.from_pretrained(export_hf(config.output_dir, tmp_path / "exported"))
    data = PretrainingData(config, load_tokenizer(config.tokenizer), "validation")
    with torch.no_grad():
        expected = model(**collate([data.sample(index) for index in range(7)])).loss.item()
    assert found == pytest.approx([expected] * 3, abs=1e-5)


def test_validation_interval(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, evaluation__interval_steps=4)
    assert run(config) == 0
    assert [record["step"] for record in metrics(config) if "validation_loss" in record] == [4, 6]


@pytest.mark.parametrize("layout", [{}, {"parallel__tensor": 2}, {"parallel__pipeline": 2}], ids=str)
def test_starts_from_a_folder(tmp_path: Path, corpus: Path, layout: dict[str, Any]) -> None:
    """The first loss of a run that starts from an export is that of the exported weights."""
    first = small_config(tmp_path / "first", corpus)
    assert run(first) == 0
    folder = export_hf(first.output_dir, tmp_path / "exported")
    second = small_config(tmp_path / "second", corpus, init_from=str(folder), train__seed=1, **layout)
    assert run(second, 2) == 0
    data = PretrainingData(second, load_tokenizer(second.tokenizer), "train")
    model = OrthrosForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = model(**collate([data.sample(index) for index in range(8)])).loss.item()
    assert losses(second)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has hidden_size 32, this config 48; make them agree"),
        ({"init_from": "/nowhere"}, "has no config.json"),
    ],
)
def test_unfit_start_folder(tmp_path: Path, corpus: Path, options: dict[str, Any], message: str) -> None:
    source = small_config(tmp_path / "source", corpus, train__steps=2)
    assert run(source) == 0
    folder = export_hf(source.output_dir, tmp_path / "exported")
    config = small_config(
        tmp_path / "run", corpus, **{"init_from": str(folder), "model": {**MODEL, "hidden_size": 48}, **options}
    )
    with pytest.raises(AssertionError, match=f"InputError: .*{message}"):
        run(config)
    assert not (tmp_path / "run").exists()


def test_world_size_that_does_not_divide_the_batch(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, train__micro_batch_size=8)
    with pytest.raises(AssertionError, match=r"InputError: train\.global_batch_size"):
        run(config, 2)
    assert not (tmp_path / "run").exists()


def launch(config: Config, folder: Path, *prefix: str) -> subprocess.CompletedProcess[str]:
    """`python -m orthros_train` in a real process tree."""
    file = folder / "run.yaml"
    file.write_text(config_to_yaml(config))
    environment = {key: value for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    command = [*prefix, "-m", "orthros_train", str(file)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_under_torchrun(tmp_path: Path, corpus: Path) -> None:
    """Two ranks of a real launcher equal two forked ones, and nothing but our own lines is printed."""
    config = small_config(tmp_path / "launched", corpus, logging__interval_steps=2, parallel__zero_stage=2)
    forked = small_config(tmp_path / "forked", corpus, parallel__zero_stage=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = launch(config, tmp_path, *torchrun)
    assert done.returncode == 0, done.stderr
    assert "arning" not in done.stderr
    assert run(forked, 2) == 0
    assert losses(config) == losses(forked)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("orthros, base window 8, ")
    assert lines[0].endswith(
        f" parameters; 2 ranks, ZeRO-2, fp32 on cpu; step 0 to 6, 256 tokens a step; logs in {config.output_dir}"
    )
    assert [line.split(" |")[0] for line in lines[1:4]] == ["step 2/6", "step 4/6", "step 6/6"]
    assert [line.split(" ")[0] for line in lines[4:]] == ["saved", "done:"]
    assert checkpoint_names(config) == ["step_00000006"]


def test_without_a_launcher(tmp_path: Path, corpus: Path) -> None:
    """One process needs no environment, and prints nothing but its own lines."""
    config = small_config(tmp_path / "run", corpus, train__steps=2, logging__tensorboard=True)
    done = launch(config, tmp_path, sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == ["orthros,", "step", "saved", "done:"]


def test_a_start_folder_describes_the_model(tmp_path: Path, corpus: Path) -> None:
    """The section `model` may say what differs, or nothing at all."""
    config = small_config(tmp_path / "run", corpus, train__steps=2)
    assert run(config) == 0
    folder = export_hf(config.output_dir, tmp_path / "model")
    values = config.model_dump(exclude={"model"})
    same = Config.model_validate({**values, "init_from": str(folder)})
    assert same.model.hidden_size == MODEL["hidden_size"]
    assert same.model.base_window == MODEL["base_window"]
    wider = Config.model_validate({**values, "init_from": str(folder), "model": {"base_window": 16}})
    assert (wider.model.base_window, wider.model.num_hidden_layers) == (16, MODEL["num_hidden_layers"])
    other = {"architecture": "transformer", "base_window": None}
    assert Config.model_validate({**values, "init_from": str(folder), "model": other}).model.query_affine is None
    resumed = Config.model_validate({**wider.model_dump(), "init_from": str(tmp_path / "gone")})
    assert resumed.model == wider.model


def test_a_start_over_and_a_longer_schedule_are_said(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("broken before the first checkpoint")

    config = small_config(tmp_path / "run", corpus, train__steps=4)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_one_step", fail)
        with pytest.raises(Exception, match="broken before"):
            run(config)
    assert run(config) == 0
    assert "attempt 2" in (said := capfd.readouterr().out)
    assert "holds no checkpoint yet, starting from step 0" in said
    assert run(small_config(tmp_path / "run", corpus, train__steps=6)) == 0
    assert "train.steps was 4 and is 6: the learning rate goes on at" in capfd.readouterr().out


def test_what_tensor_parallelism_says_to_cuda_is_said_before_cuda_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels in the order of the program: CUDA reads the variable once, when it starts."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    monkeypatch.delitem(sys.modules, "orthros_train.parallel.quiet_megatron", raising=False)
    seen: list[str | None] = []

    def start(timeout_seconds: float) -> None:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        raise InputError("that is all")

    monkeypatch.setattr(loop, "start_ranks", start)
    config = small_config(tmp_path / "run", write_corpus(tmp_path, ["some words"] * 20))
    for tensor in (1, 2):
        config.parallel.tensor = tensor
        with pytest.raises(InputError, match="that is all"):
            loop.train(config, [])
    assert seen == [None, "1"]
