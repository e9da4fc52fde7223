"""Whole runs on the tensor and pipeline axes: they resume bitwise, move between layouts, and stop as the others do."""

from __future__ import annotations

import itertools
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from orthros_train.config import Config
from orthros_train.conversion.from_checkpoint import export_hf
from orthros_train.training import checkpoints, loop
from orthros_train.training.manifest import read_manifest
from orthros_train.training.pipeline_engine import PipelineEngine
from tests.training.small_runs import MODEL, assert_same_state, metrics, run, small_config, untimed
from tests.training.test_stopping import send, status, then

# name: (ranks, options)
Layout = tuple[int, dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "one process": (1, {}),
    "DP2·ZeRO-2": (2, {"parallel__zero_stage": 2}),
    "PP2": (2, {"parallel__pipeline": 2}),
    "TP2·SP": (2, {"parallel__tensor": 2, "parallel__sequence": True}),
    "TP2·ZeRO-3": (2, {"parallel__tensor": 2, "parallel__zero_stage": 3}),
    "PP2·TP2": (4, {"parallel__pipeline": 2, "parallel__tensor": 2}),
    "PP2·DP2": (4, {"parallel__pipeline": 2}),
    "TP2·DP2·ZeRO-3": (4, {"parallel__tensor": 2, "parallel__zero_stage": 3}),
}
SOURCES = ["PP2·TP2", "PP2·DP2", "TP2·ZeRO-3", "DP2·ZeRO-2"]
PAIRS = list(itertools.product(SOURCES, [*SOURCES, "one process"]))
COMMON = {"schedule__decay_steps": 8, "evaluation__interval_steps": 5, "checkpoint__interval_steps": 5}
COMMON |= {"model": {**MODEL, "tie_word_embeddings": True, "qk_norm": True}, "optimizer__learning_rate": 0.003}


def checkpoint(config: Config, step: int) -> Path:
    return Path(config.output_dir) / "checkpoints" / f"step_{step:08d}"


def assert_resumes_bitwise(folder: Path, corpus: Path, layout: str, precision: str) -> None:
    ranks, options = LAYOUTS[layout]
    options = {**COMMON, **options, "precision": precision}
    whole = small_config(folder / "whole", corpus, train__steps=10, **options)
    assert run(whole, ranks) == 0
    for steps in (5, 10):
        halves = small_config(folder / "halves", corpus, train__steps=steps, **options)
        assert run(halves, ranks) == 0
    assert untimed(halves) == untimed(whole)
    assert_same_state(checkpoint(halves, 10), checkpoint(whole, 10))


@pytest.mark.parametrize(("layout", "precision"), [("PP2", "bf16"), ("TP2·SP", "fp32"), ("PP2·TP2", "fp32")])
def test_resumes_bitwise(tmp_path: Path, corpus: Path, layout: str, precision: str) -> None:
    assert_resumes_bitwise(tmp_path, corpus, layout, precision)


@pytest.mark.evidence
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_resumes_bitwise(tmp_path: Path, corpus: Path, layout: str, precision: str) -> None:
    assert_resumes_bitwise(tmp_path, corpus, layout, precision)


def assert_moves(folder: Path, corpus: Path, source: str, target: str, precision: str = "fp32") -> None:
    """Five steps in one layout and five in another lose what ten in the first lose; an export has no trace of them."""
    whole = small_config(folder / "whole", corpus, train__steps=10, **COMMON, **LAYOUTS[source][1], precision=precision)
    moved = [
        small_config(folder / "moved", corpus, train__steps=steps, **COMMON, **LAYOUTS[layout][1], precision=precision)
        for steps, layout in ((5, source), (10, target))
    ]
    assert run(whole, LAYOUTS[source][0]) == 0
    for config, layout in zip(moved, (source, target), strict=True):
        assert run(config, LAYOUTS[layout][0]) == 0
    bound = 1e-5 if precision == "fp32" else 2e-3
    for key in ("loss", "grad_norm", "validation_loss"):
        one, two = (
            torch.tensor([record[key] for record in metrics(config) if key in record]) for config in (moved[1], whole)
        )
        assert one.shape == two.shape
        assert (one - two).abs().max() <= bound * max(1.0, two.abs().max()), key
    assert [record["learning_rate"] for record in metrics(moved[1])] == [r["learning_rate"] for r in metrics(whole)]
    manifests = [read_manifest(checkpoint(config, 10)) for config in (moved[1], whole)]
    assert manifests[0].progress == manifests[1].progress
    shapes = [{name: record.shape for name, record in manifest.parameters.items()} for manifest in manifests]
    assert shapes[0] == shapes[1]
    exported = load_file(export_hf(moved[1].output_dir, folder / "exported") / "model.safetensors")
    assert exported["model.embed_tokens.weight"].shape == (259, MODEL["hidden_size"])


@pytest.mark.parametrize(
    ("source", "target"), [("PP2·TP2", "TP2·ZeRO-3"), ("TP2·ZeRO-3", "PP2·DP2"), ("PP2·DP2", "one process")]
)
def test_moves_to_another_layout(tmp_path: Path, corpus: Path, source: str, target: str) -> None:
    assert_moves(tmp_path, corpus, source, target)


@pytest.mark.evidence
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_layout_moves_to_every_other(
    tmp_path: Path, corpus: Path, source: str, target: str, precision: str
) -> None:
    assert_moves(tmp_path, corpus, source, target, precision)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("layout", ["PP2", "PP2·TP2", "TP2·SP"])
def test_bf16_accumulates_what_one_process_does(tmp_path: Path, corpus: Path, layout: str, tied: bool) -> None:
    """Over the micro-batches of a step; fp32 follows other ways inside DeepSpeed. bf16 has 8 bits of mantissa."""
    options = {**COMMON, "model": {**MODEL, "tie_word_embeddings": tied}, "precision": "bf16", "train__steps": 2}
    norms = {}
    for name in ("one process", layout):
        config = small_config(tmp_path / name.replace(" ", "-"), corpus, **options, **LAYOUTS[name][1])
        assert run(config, LAYOUTS[name][0]) == 0
        norms[name] = [record["grad_norm"] for record in metrics(config)]
    assert norms[layout] == pytest.approx(norms["one process"], rel=0.01)


MOMENTS = {
    "training": (loop, "_one_step", 4, 3),
    "validation": (PipelineEngine, "loss_sum", 2, 2),
    "saving": (checkpoints, "save_state", 1, 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_to_one_rank(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """All ranks of a pipeline save the same step, and the next attempt ends as if nothing had happened."""
    options = {"evaluation__samples": 7, "evaluation__interval_steps": 2, "train__micro_batch_size": 1}
    options |= {"checkpoint__interval_steps": 3, "parallel__pipeline": 2}
    whole = small_config(tmp_path / "whole", corpus, **options)
    stopped = small_config(tmp_path / "stopped", corpus, **options)
    assert run(whole, 2) == 0
    owner, name, call, step = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then(send(signal.SIGTERM), getattr(owner, name), call))
        assert run(stopped, 2) == 75
    assert (status(stopped)["step"], status(stopped)["reason"]) == (step, "SIGTERM on rank 1")
    assert run(stopped, 2) == 0
    assert untimed(stopped) == untimed(whole)
    assert_same_state(checkpoint(stopped, 6), checkpoint(whole, 6))


def test_more_ranks_than_the_layout_takes_are_refused(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, parallel__pipeline=2)
    with pytest.raises(AssertionError, match=r"do not factor into parallel\.tensor=1 x parallel\.pipeline=2"):
        run(config, 3)
    assert not (tmp_path / "run").exists()


def test_the_record_of_a_step_does_not_depend_on_the_layout(tmp_path: Path, corpus: Path) -> None:
    """Tokens, labels and executed FLOPs are counted once a replica."""
    figures = []
    for layout in ("one process", "PP2·TP2"):
        ranks, options = LAYOUTS[layout]
        config = small_config(tmp_path / layout, corpus, **COMMON, **options, train__steps=2, logging__peak_tflops=1.0)
        assert run(config, ranks) == 0
        record = metrics(config)[0]
        flops = {key: record[key] * record["step_seconds"] * ranks for key in ("mfu_exact", "mfu_palm")}
        figures.append({**flops, **{key: record[key] for key in ("tokens_seen", "loss_tokens", "output_tokens")}})
    assert figures[0] == pytest.approx(figures[1])
    receipt = json.loads((tmp_path / "PP2·TP2" / "receipt.json").read_text())
    assert receipt["world_size"] == 4
