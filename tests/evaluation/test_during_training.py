"""Scores of a model in training, alone and on several ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer

from evaluation import run, scoring
from evaluation.during_training import RunSuites, find_run_suites, open_suites
from evaluation.suites import data_sets, data_sources
from evaluation.suites.catalog import SuiteOptions, find_suites
from evaluation.suites.data_sources import KeptSource, MirrorSource
from evaluation.suites.task_card import TaskSetting
from orthros_train.config.evaluation import SuitesSection
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.distributed import run_distributed
from tests.evaluation.test_data_sources import PIQA_ROWS, Rows
from tests.evaluation.tiny_models import save_orthros, tiny_orthros
from tools.mirror_datasets import mirror


def save_run_files(folder: Path) -> None:
    ByteTokenizer().save_pretrained(folder)
    tiny_orthros().config.save_pretrained(folder)


@pytest.fixture
def source(tmp_path: Path) -> MirrorSource:
    mirror(data_sets.PIQA, Rows(PIQA_ROWS), tmp_path / "mirror")
    return MirrorSource(tmp_path / "mirror")


@pytest.fixture
def suites(source: MirrorSource, tmp_path: Path) -> RunSuites:
    ByteTokenizer().save_pretrained(tmp_path / "bytes")
    setting = TaskSetting(source, AutoTokenizer.from_pretrained(tmp_path / "bytes"))
    return RunSuites(find_suites(["commonsense"], SuiteOptions()), setting, skip_unavailable=True)


def test_metrics_by_suite_and_task(suites: RunSuites, tmp_path: Path) -> None:
    model = tiny_orthros().float().train()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    found = suites(model, tmp_path / "out")
    assert found is not None
    assert set(found) == {"commonsense/piqa/acc", "commonsense/mean"}
    assert found["commonsense/mean"] == found["commonsense/piqa/acc"]
    assert model.training
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert results["results"]["piqa"]["acc,none"] == found["commonsense/piqa/acc"]
    assert results["config"]["model_source"] == str(tmp_path / "out")


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def test_random_generators_are_left_alone(suites: RunSuites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from evaluation.task_runs import TaskRunner  # noqa: PLC0415

    original = TaskRunner._evaluate

    def drawing(self: TaskRunner, card: Any) -> Any:
        seed(1)  # as a library well might
        return original(self, card)

    monkeypatch.setattr(TaskRunner, "_evaluate", drawing)
    model = tiny_orthros().float()
    seed(5)
    suites(model, tmp_path / "out")
    after = draw()
    seed(5)
    assert after == draw()


def test_changed_weights_are_scored_anew(suites: RunSuites, tmp_path: Path) -> None:
    model = tiny_orthros().float()
    suites(model, tmp_path)
    first = json.loads((tmp_path / "tasks" / "piqa.json").read_text())["key"]["weights"]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    suites(model, tmp_path)
    assert json.loads((tmp_path / "tasks" / "piqa.json").read_text())["key"]["weights"] != first


@pytest.mark.parametrize("after", [0, 1])
def test_giving_up_leaves_no_record(
    suites: RunSuites, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Before the first batch or between two; the model is as it was."""
    monkeypatch.setattr(scoring, "CPU_TOKENS", 1)
    asked: list[int] = []

    def give_up() -> bool:
        asked.append(1)
        return len(asked) > after

    model = tiny_orthros().float().train()
    assert suites(model, tmp_path / "out", give_up) is None
    assert not (tmp_path / "out").exists()
    assert model.training
    assert suites(model, tmp_path / "out") is not None


def test_nothing_is_read_a_second_time(suites: RunSuites, source: MirrorSource, tmp_path: Path) -> None:
    kept = KeptSource(source)
    rows, splits, origin = (
        kept.split(data_sets.PIQA, "validation"), kept.available(data_sets.PIQA), kept.describe(data_sets.PIQA)
    )  # fmt: skip
    for file in (tmp_path / "mirror" / "piqa").iterdir():
        file.unlink()
    assert kept.split(data_sets.PIQA, "validation") is rows
    assert (kept.available(data_sets.PIQA), kept.describe(data_sets.PIQA)) == (splits, origin)
    assert origin["source"] == kept.name == "mirror"
    with pytest.raises(InputError, match="holds no data set hellaswag"):
        kept.available(data_sets.HELLASWAG)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ["recal"]}, r"evaluation\.suites: there is no suite 'recal'; did you mean recall"),
        ({"names": ["synthetic"]}, "synthetic trains arms of its own .* run it apart: python -m evaluation.run"),
        ({"names": ["perplexity"], "texts": ["absent.txt"]}, r"evaluation\.suites: cannot read absent\.txt"),
    ],
)
def test_suites_that_a_run_cannot_have(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_run_suites(SuitesSection(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_dir": "absent"}, "--data-dir absent is not a folder.*--data-dir is evaluation.suites.data_dir"),
        (
            {"data_dir": "MIRROR"},
            "task lambada_openai: the mirror .* holds no data set lambada.*--skip-unavailable",
        ),
        ({}, "cannot be had from the hub.*--data-dir is evaluation.suites.data_dir"),
    ],
)
def test_data_out_of_reach_is_found_when_suites_are_opened(
    source: MirrorSource, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    options = {key: str(tmp_path / "mirror") if value == "MIRROR" else value for key, value in options.items()}
    with pytest.raises(InputError, match=message):
        open_suites(SuitesSection(names=["commonsense"], **options), save_run_files)


def test_a_run_goes_without_what_the_hub_does_not_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`skip_unavailable` leaves out what cannot be had; at its steps the run asks for it no more."""
    asked: list[str] = []

    def load(hub: str, *_: Any, **__: Any) -> Dataset:
        asked.append(hub)
        if hub == data_sets.PIQA.hub:
            return Dataset.from_list(PIQA_ROWS)
        raise ConnectionError("no way to the hub")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr(data_sources, "hub_commit", lambda _: None)
    with pytest.raises(InputError, match=r"task lambada_openai: .*cannot be had from the hub.*--skip-unavailable"):
        open_suites(SuitesSection(names=["commonsense"]), save_run_files)
    section = SuitesSection(names=["commonsense", "long"], lengths=[257], skip_unavailable=True)
    scorer = open_suites(section, save_run_files)
    said = capsys.readouterr().out
    assert said.count("evaluation.suites: Not scored: long_single_257, long_multikey_257, long_multivalue_257, ") == 1
    assert said.count("it takes 257 tokens") == 1
    monkeypatch.setenv("RANK", "1")
    open_suites(section, save_run_files)
    assert capsys.readouterr().out == ""
    count = len(asked)
    found = scorer(tiny_orthros().float(), tmp_path / "out", lambda: False)
    assert found is not None
    assert set(found) == {"commonsense/piqa/acc", "commonsense/mean"}
    assert len(asked) == count
    left_out = json.loads((tmp_path / "out" / "results.json").read_text())["orthros"]["left_out"]
    assert "no way to the hub" in left_out["hellaswag"]
    assert "the model reads 256" in left_out["long_single_257"]


def test_a_damaged_file_is_found_when_suites_are_opened(source: MirrorSource, tmp_path: Path) -> None:
    (tmp_path / "mirror" / "piqa" / "validation.parquet").write_bytes(b"other")
    section = SuitesSection(names=["commonsense"], data_dir=str(tmp_path / "mirror"), skip_unavailable=True)
    with pytest.raises(InputError, match=r"differs from its manifest's SHA-256"):
        open_suites(section, save_run_files)


def test_the_command_on_two_ranks_gives_one_ranks_results(source: MirrorSource, tmp_path: Path) -> None:
    """Also of a task that has fewer documents than there are ranks."""
    folder = save_orthros(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat")

    def work(name: str) -> int:
        torch.set_num_threads(1)
        data = ["--data-dir", str(tmp_path / "mirror"), "--tasks", "piqa", "--suite", "perplexity", "--text", str(text)]
        return run.main(["--model", str(folder), *data, "--output", str(tmp_path / name)])

    assert work("one") == 0
    assert run_distributed(work, 2, "two", process_group=False) == [0, 0]  # the command joins the ranks itself
    assert run_distributed(work, 2, "two", process_group=False) == [0, 0]  # from its records
    one, two = (json.loads((tmp_path / name / "results.json").read_text()) for name in ("one", "two"))
    assert two["results"] == one["results"]
    for task in ("piqa", "text_text"):
        assert two["orthros"]["records"][task]["documents"] == one["orthros"]["records"][task]["documents"]
