"""The benchmark's rows and counts, the optimizer's step, and the command."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import training_step
from benchmarks.training_step import batch_for, build_parser, case_names, flops_of, for_llama, step_call, step_calls
from evaluation.benchmarking.models import arm_configs, build_arms
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.flops import training_flops
from orthros_train.training import compilation
from orthros_train.training import optimizer as optimizers
from tests.benchmarks.shapes import QUICK
from tests.model.tiny import assert_close

SMALL = (*QUICK, "--length", "64", "--repeats", "2")


def run(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    output = tmp_path / "new" / "step.json"
    assert training_step.main(["--output", str(output), *SMALL, *arguments]) == 0
    return {record["case"]: record for record in json.loads(output.read_text())["records"]}


def options(*arguments: str) -> Any:
    return build_parser().parse_args(["--output", "x", *SMALL, *arguments])


def test_answers_are_at_the_end_of_each_conversation() -> None:
    batch = batch_for("sft", options("--conversations", "2", "--answer-share", "0.25", "--rows", "3"), 61)
    assert batch["output_positions"].tolist() == [[*range(24, 32), *range(56, 64)]] * 3
    assert batch["shift_labels"].shape == (3, 16)
    assert batch["document_ids"].tolist() == [[0] * 32 + [1] * 32] * 3
    batch = batch_for("sft", options("--conversations", "3", "--answer-share", "0.1"), 61)
    assert batch["output_positions"].tolist() == [[19, 20, 40, 41, 62, 63]]  # the last one has what does not divide


def test_one_conversation_is_a_plain_row() -> None:
    batch = batch_for("pt", options(), 61)
    assert batch.keys() == {"input_ids", "shift_labels"}
    assert for_llama(batch).keys() == {"input_ids", "labels", "shift_labels"}


@pytest.mark.parametrize("use", ["pt", "sft"])
@pytest.mark.parametrize("conversations", ["1", "3"])
def test_llama_computes_the_same_loss_and_gradients(use: str, conversations: str) -> None:
    """With the transformer arm's weights: labels, positions and what a conversation sees are the same."""
    given = options("--conversations", conversations, "--answer-share", "0.3", "--rows", "2")
    models = build_arms(arm_configs(given, 64, gradients=True), ["transformer", "llama"], "fp32", "cpu")
    batch = batch_for(use, given, 61)
    losses = [
        models["transformer"](**batch, use_cache=False, return_logits=False).loss,
        models["llama"](**for_llama(batch), use_cache=False).loss,
    ]
    assert_close(losses[1], losses[0], 1e-6)
    for loss in losses:
        loss.backward()
    assert_close(models["llama"].lm_head.weight.grad, models["transformer"].lm_head.weight.grad, 1e-5)
    first = [models[arm].model.layers[0].self_attn.k_proj.weight.grad for arm in ("llama", "transformer")]
    assert_close(first[0], first[1], 1e-5)


def test_flops_are_the_counters() -> None:
    given = options("--rows", "2", "--answer-share", "0.5", "--conversations", "2")
    configs = arm_configs(given, 64, gradients=True)
    sft = batch_for("sft", given, 61)
    columns = [*range(16, 32), *range(48, 64)]
    expected = 2 * training_flops(configs["orthros"], [32, 32], columns).total
    assert flops_of("orthros sft", configs, sft) == expected
    for use in ("pt", "sft"):  # logits at every position
        batch = batch_for(use, given, 61)
        assert flops_of(f"llama {use}", configs, batch) == 2 * training_flops(configs["transformer"], [32, 32]).total


def test_a_step_leaves_no_gradients_and_the_optimizer_moves_the_weights() -> None:
    for optimizer in (False, True):
        given = options(*["--optimizer"] * optimizer, "--recompute")
        model = build_arms(arm_configs(given, 64, gradients=True), ["orthros"], "fp32", "cpu")["orthros"]
        before = model.lm_head.weight.clone()
        with torch.no_grad():
            step_call(model, batch_for("pt", given, 61), given)()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(before, model.lm_head.weight) != optimizer
        assert model.is_activation_checkpointing


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that training uses, once a model, and our arms alone."""
    compiled: list[Any] = []
    monkeypatch.setattr(compilation, "compile_layers", lambda model, device: compiled.append((model, device)))
    given = options("--compile")
    configs = arm_configs(given, 64, gradients=True)
    step_calls(case_names(given), configs, given)
    assert [(type(model).__name__, model.config.architecture, device.type) for model, device in compiled] == [
        ("OrthrosForCausalLM", arm, "cpu") for arm in ("transformer", "orthros")
    ]
    step_calls(case_names(given), configs, options())
    assert len(compiled) == 2


@pytest.mark.parametrize("steps_before", [0, 1])
def test_a_peak_is_not_the_compilers(monkeypatch: pytest.MonkeyPatch, steps_before: int) -> None:
    """What is compiled runs once before, and leaves neither gradients nor the optimizer's moments."""
    monkeypatch.setattr(compilation, "compile_layers", lambda model, device: None)
    forward, models = OrthrosForCausalLM.forward, []

    def counted(model: OrthrosForCausalLM, **inputs: Any) -> Any:
        models.append(model)
        return forward(model, **inputs)

    monkeypatch.setattr(OrthrosForCausalLM, "forward", counted)
    made: list[torch.optim.Optimizer] = []
    build = optimizers.build_optimizer
    monkeypatch.setattr(optimizers, "build_optimizer", lambda *given: made.append(build(*given)) or made[-1])
    given = options("--optimizer", "--peak-of", "orthros pt", *["--compile"] * steps_before)
    call = step_calls(["orthros pt"], arm_configs(given, 64, gradients=True), given)[0]["orthros pt"]
    assert len(models) == steps_before
    assert not made[0].state
    assert all(parameter.grad is None for model in models for parameter in model.parameters())
    call()
    assert len(models) == steps_before + 1
    assert made[0].state


@pytest.mark.evidence
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="needs a C++ compiler")
def test_a_compiled_step_is_timed(tmp_path: Path) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert run(tmp_path, "--compile", "--uses", "pt", "--arms", "orthros").keys() == {"orthros pt"}
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2


def test_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run(tmp_path, "--peak-tflops", "1")
    assert list(records) == [f"{arm} {use}" for use in ("pt", "sft") for arm in ("transformer", "orthros", "llama")]
    flops = {case: record["flops"] for case, record in records.items()}
    assert flops["transformer sft"] < flops["transformer pt"] == flops["llama pt"] < flops["orthros pt"]
    assert flops["llama sft"] == flops["llama pt"]
    for case, record in records.items():
        base = records[f"transformer {case.split()[1]}"]
        peer = records[f"llama {case.split()[1]}"]
        assert record["over_peer"] == pytest.approx(record["seconds"] / peer["seconds"])
        assert record["flop_ratio"] == pytest.approx(base["flops"] / record["flops"])
        assert record["mfu_exact"] == pytest.approx(record["flops"] / record["seconds"] / 1e12)
        assert record["tokens_per_second"] == pytest.approx(64 / record["seconds"])
    assert "orthros sft" in capsys.readouterr().out


def test_packed_rows_and_their_peaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def child(command: list[str], what: str) -> float:
        asked.append(command[-1])
        return 2.5

    monkeypatch.setattr("evaluation.benchmarking.peak_memory.in_own_process", child)
    records = run(tmp_path, "--conversations", "4", "--uses", "pt", "--peak-memory")
    assert list(records) == asked == ["transformer pt", "orthros pt", "llama pt"]
    assert records["orthros pt"]["peak_growth_mib"] == 2.5
    assert records["orthros pt"]["mfu_exact"] is None


def test_times_stay_where_a_peak_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def child(command: list[str], what: str) -> float:
        raise InputError(f"{what} cannot be measured: exit code -9, killed")

    monkeypatch.setattr("evaluation.benchmarking.peak_memory.in_own_process", child)
    output = tmp_path / "step.json"
    given = ["--uses", "pt", "--arms", "orthros", "--peak-memory"]
    assert training_step.main(["--output", str(output), *SMALL, *given]) == 1
    (record,) = json.loads(output.read_text())["records"]
    assert record["seconds"] > 0
    assert record["peak_growth_mib"] is None
    assert record["peak_memory_problem"] == "the peak memory of orthros pt cannot be measured: exit code -9, killed"
    assert f"LEFT OUT: {record['peak_memory_problem']}\n" in capsys.readouterr().out


def test_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The remedy is one that this command has."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(InputError, match="name it in CXX, or leave --compile out"):
        run(tmp_path, "--compile")


def test_the_peak_of_one_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits are held only where that is asked for."""
    big = ["--length", "4096", "--vocabulary", "12000", "--peak-of", "transformer pt"]
    logits_mib = 4096 * 12000 * 4 / 2**20
    peaks = []
    for option in ([], ["--all-logits"]):
        assert training_step.main(["--output", str(tmp_path / "x.json"), *SMALL, *big, *option]) == 0
        peaks.append(float(capsys.readouterr().out))
    assert peaks[0] < 0.7 * peaks[1]
    assert logits_mib < peaks[1] < 10 * logits_mib
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--answer-share", "0"), "give a share above 0 and at most 1"),
        (("--length", "3", "--conversations", "4"), "--conversations must be at most --length"),
        (("--peak-tflops", "0"), "must be a finite number above 0"),
        (("--uses", "pt,rl"), "not a list of pt, sft"),
        (("--compile", "--recompute"), "--compile and --recompute exclude each other"),
        (("--peak-of", "orthros rl"), "'orthros rl' is none of transformer pt"),
        (("--attention-kernel", "flex"), "FlexAttention has no backward on CPU"),
    ],
)
def test_bad_input(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        training_step.main(["--output", str(tmp_path / "x.json"), *SMALL, *arguments])
