"""Training the query affines alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import orthros_config
from orthros_train.config.adaptation import AdaptationSection
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.training.freezing import freeze
from orthros_train.training.initial_model import InitialValues, build_model
from orthros_train.training.optimizer import AFFINES
from tests.training.small_runs import MODEL, losses, run, small_config, untimed

FROZEN = {"adaptation__freeze": "all_but_affines"}


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (1, {"parallel__zero_stage": 1}),
        (2, {"parallel__zero_stage": 2}),
        (2, {"parallel__zero_stage": 3}),
        (2, {"parallel__tensor": 2}),
        (2, {"parallel__pipeline": 2}),
    ],
    ids=["one", "zero2", "zero3", "tensor", "pipeline"],
)
def test_only_affines_move(tmp_path: Path, corpus: Path, ranks: int, layout: dict[str, Any]) -> None:
    config = small_config(tmp_path / "run", corpus, **layout, **FROZEN)
    assert run(config, ranks) == 0
    trained = OrthrosForCausalLM.from_pretrained(export_hf(config.output_dir, tmp_path / "exported"))
    start = dict(build_model(InitialValues(config, orthros_config(config, 259))).named_parameters())
    for name, parameter in trained.named_parameters():
        is_affine = name.split(".")[-2] in AFFINES
        assert torch.equal(parameter, start[name]) != is_affine, name
    assert losses(config)[-1] < losses(config)[0]


def test_the_affines_move_as_they_would_by_themselves(tmp_path: Path, corpus: Path) -> None:
    """Their gradients do not depend on what else trains."""
    shared: dict[str, Any] = {"train__steps": 1, "schedule__warmup_steps": 0}
    shared |= {"optimizer__clip_grad_norm": None, "optimizer__affine_lr_scale": 3.0}
    frozen = small_config(tmp_path / "frozen", corpus, **shared, **FROZEN)
    free = small_config(tmp_path / "free", corpus, **shared)
    models = []
    for config in (frozen, free):
        assert run(config) == 0
        models.append(OrthrosForCausalLM.from_pretrained(export_hf(config.output_dir, f"{config.output_dir}-exported")))
    parameters = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        if name.split(".")[-2] in AFFINES:
            assert torch.equal(parameter, parameters[name]), name


def test_resumes_in_another_layout(tmp_path: Path, corpus: Path) -> None:
    options = {"schedule__decay_steps": 4, "checkpoint__interval_steps": 3, **FROZEN}
    whole = small_config(tmp_path / "whole", corpus, **options)
    half = small_config(tmp_path / "halves", corpus, train__steps=3, **options)
    rest = small_config(tmp_path / "halves", corpus, parallel__zero_stage=3, **options)
    assert run(whole) == run(half) == run(rest, 2) == 0
    found, expected = untimed(rest), untimed(whole)
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], abs=1e-5)


@pytest.mark.parametrize("model", [{**MODEL, "query_affine": "none"}, {**MODEL, "architecture": "transformer"}])
def test_a_model_without_affines_has_nothing_to_train(tmp_path: Path, corpus: Path, model: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="all_but_affines leaves nothing to train"):
        small_config(tmp_path, corpus, model=model, **FROZEN)


def test_a_pipeline_stage_without_affines_has_nothing_to_train() -> None:
    with pytest.raises(InputError, match=r"nothing to train in a pipeline stage .*: lower parallel\.pipeline"):
        freeze(torch.nn.Embedding(5, 4), AdaptationSection(freeze="all_but_affines"))
