"""SmolLM2-135M on real questions: both arms score as lm-eval's own `hf` model does, at every batch size."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from evaluation.lm_eval_model import OrthrosLM
from evaluation.model_source import load_evaluated_model
from evaluation.suites.catalog import SuiteOptions, find_suites
from evaluation.suites.data_sources import PackageSource
from evaluation.suites.task_card import TaskSetting
from orthros_train.conversion.smollm2 import smollm2_folder

CACHE = Path(__file__).parents[2] / ".cache"
WINDOW = 8192  # all of the model's positions: Orthros then equals its source
ARMS = {"transformer": None, "orthros": WINDOW}

Samples = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder(CACHE)


def score(lm: Any, limit: int) -> tuple[Samples, Mapping[str, Any]]:
    """Every document's answers and the results of the eight commonsense tasks."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    setting = TaskSetting(PackageSource(CACHE), lm.tokenizer, limit=limit)
    (suite,) = find_suites(["commonsense"], SuiteOptions())
    tasks = {card.name: card.build(setting) for card in suite.cards}
    output: Any = evaluate(lm=lm, task_dict={"tasks": tasks}, limit=limit, bootstrap_iters=0)
    return output["samples"], output["results"]


@pytest.fixture(scope="module")
def harness(folder: Path) -> HFLM:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(folder), device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def five(harness: HFLM) -> tuple[Samples, Mapping[str, Any]]:
    return score(harness, 5)


@pytest.fixture(scope="module")
def hundred(harness: HFLM) -> tuple[Samples, Mapping[str, Any]]:
    return score(harness, 100)


@pytest.fixture(scope="module", params=ARMS)
def arm(request: pytest.FixtureRequest, folder: Path) -> Any:
    return load_evaluated_model(folder, dtype="fp32", base_window=ARMS[request.param])


def check(arm: Any, batch_size: int | str, expected: tuple[Samples, Mapping[str, Any]], limit: int) -> None:
    lm = OrthrosLM(arm, batch_size=batch_size)
    samples, results = score(lm, limit)
    worst, questions = 0.0, 0
    for task, theirs in expected[0].items():
        for ours, their in zip(samples[task], theirs, strict=True):
            assert ours["arguments"] == their["arguments"]
            for (_, continuation), answer, reference in zip(
                their["arguments"], ours["filtered_resps"], their["filtered_resps"], strict=True
            ):
                tokens = max(1, len(lm.tok_encode(continuation)))
                worst = max(worst, abs(answer[0] - reference[0]) / tokens)
                assert answer[1] == reference[1], (task, continuation)
                questions += 1
        for metric, value in expected[1][task].items():
            if metric.startswith("acc") and "stderr" not in metric:
                assert results[task][metric] == value, (task, metric)
    assert len(expected[0]) == 8
    assert questions >= 8 * limit
    print(f"{arm.model.config.architecture}, batch {batch_size}: {questions} answers, worst {worst:.1e} a token")
    assert worst <= 1e-3


@pytest.mark.parametrize("batch_size", [1, 8])
def test_five_documents_a_task(arm: Any, batch_size: int, five: tuple[Samples, Mapping[str, Any]]) -> None:
    check(arm, batch_size, five, 5)


@pytest.mark.evidence
@pytest.mark.parametrize("batch_size", [1, 8, "auto"])
def test_a_hundred_documents_a_task(
    arm: Any, batch_size: int | str, hundred: tuple[Samples, Mapping[str, Any]]
) -> None:
    check(arm, batch_size, hundred, 100)
