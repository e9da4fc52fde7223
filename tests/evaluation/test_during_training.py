"""Scores of a model in training, alone and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from evaluation import run
from evaluation.during_training import suite_metrics
from evaluation.suites import data_sets
from evaluation.suites.data_sources import MirrorSource
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.distributed import run_distributed
from tests.evaluation.test_data_sources import PIQA_ROWS, Rows
from tests.evaluation.tiny_models import save_orthros, tiny_orthros
from tools.mirror_datasets import mirror


@pytest.fixture
def source(tmp_path: Path) -> MirrorSource:
    mirror(data_sets.PIQA, Rows(PIQA_ROWS), tmp_path / "mirror")
    return MirrorSource(tmp_path / "mirror")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    ByteTokenizer().save_pretrained(tmp_path / "bytes")
    return AutoTokenizer.from_pretrained(tmp_path / "bytes")


def test_metrics_by_suite_and_task(source: MirrorSource, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_orthros().float().train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = suite_metrics(model, tokenizer, ["commonsense"], source, tmp_path / "out")
    assert set(found) == {"commonsense/piqa/acc", "commonsense/mean"}
    assert found["commonsense/mean"] == found["commonsense/piqa/acc"]
    assert model.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(InputError, match="there is no suite"):
        suite_metrics(model, tokenizer, ["recal"], source, tmp_path / "out")
    assert model.training


def test_changed_weights_are_scored_anew(source: MirrorSource, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_orthros().float()
    suite_metrics(model, tokenizer, ["commonsense"], source, tmp_path)
    first = json.loads((tmp_path / "tasks" / "piqa.json").read_text())["key"]["weights"]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    suite_metrics(model, tokenizer, ["commonsense"], source, tmp_path)
    assert json.loads((tmp_path / "tasks" / "piqa.json").read_text())["key"]["weights"] != first


def test_the_command_on_two_ranks_gives_one_ranks_results(source: MirrorSource, tmp_path: Path) -> None:
    folder = save_orthros(tmp_path / "model")

    def work(name: str) -> int:
        torch.set_num_threads(1)
        data = str(tmp_path / "mirror")
        return run.main(
            ["--model", str(folder), "--data-dir", data, "--tasks", "piqa", "--output", str(tmp_path / name)]
        )

    assert work("one") == 0
    assert run_distributed(work, 2, "two", process_group=False) == [0, 0]  # the command joins the ranks itself
    assert run_distributed(work, 2, "two", process_group=False) == [0, 0]  # from its records
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["results"] == one["results"]
    assert two["orthros"]["records"]["piqa"]["documents"] == one["orthros"]["records"]["piqa"]["documents"]
