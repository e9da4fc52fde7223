"""tools/plan.py as a user meets it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orthros_train.config import load_config, orthros_config
from orthros_train.model.flops import training_flops
from orthros_train.model.parameter_count import parameter_count
from orthros_train.training.disk_space import checkpoint_bytes
from tests.tools.command import ROOT, run_here

CONFIG = str(ROOT / "configs" / "orthros_1.3b.yaml")


def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    return run_here("plan", *arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_the_best_layout_is_printed_as_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, stdout, _ = plan(monkeypatch, capsys, CONFIG, "--nodes", "2", "--show", "3")
    assert code == 0
    assert "1,298,954,240 parameters" in stdout
    assert "assumed: H100 with 80 GiB of which 8 stay free" in stdout
    (heading,) = [line for line in stdout.splitlines() if line.split()[:2] == ["tensor", "pipeline"]]
    assert "gradients" in heading
    assert " KV " in heading
    assert "KV: keys and values of micro rows of 2,048 tokens" in stdout
    assert "3: " in stdout
    assert "4: " not in stdout
    load_config(Path(CONFIG), stdout.splitlines()[-1].split())


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, stdout, _ = plan(monkeypatch, capsys, CONFIG, "--gpus-per-node", "1", "--memory-gib", "12")
    assert code == 1
    assert "nothing fits 1 x H100; the one that needs least:" in stdout


def test_figures_of_the_run_are_the_counters_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["train.global_batch_size=64", "train.sequence_length=1024", "model.base_window=128"]
    _, stdout, _ = plan(monkeypatch, capsys, CONFIG, *changes, "--show", "1")
    config = load_config(Path(CONFIG), changes)
    model = orthros_config(config, 32000)
    flops = 64 * training_flops(model, [1024]).total
    parameters = parameter_count(model).total
    _, groups, head = model.head_shape
    assert stdout.splitlines()[0] == (
        f"{parameters:,} parameters; {flops:.4g} FLOPs a step of 65,536 tokens; a checkpoint takes "
        f"{checkpoint_bytes(parameters) / 2**30:.1f} GiB; in use, the KV cache of a token takes "
        f"{2 * model.num_hidden_layers * groups * head * 2 / 1024:.0f} KiB in bf16"
    )


def test_a_teacher_takes_its_room_and_what_the_figures_leave_out_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, plain, _ = plan(monkeypatch, capsys, CONFIG, "--show", "1")
    assert "teacher" not in plain
    assert "note:" not in plain
    adaptation = "adaptation={freeze: all_but_affines, distillation: {weight: 0.5, teacher: a}}"
    code, stdout, _ = plan(monkeypatch, capsys, CONFIG, adaptation, "--show", "1")
    assert code == 0
    (heading,) = [line for line in stdout.splitlines() if line.split()[:2] == ["tensor", "pipeline"]]
    names = heading.split()
    (layout,) = [line for line in stdout.splitlines() if re.search(r"\d%  +\d", line)]
    teacher = float(layout.split()[-4 - (names.index("total") - names.index("teacher"))])  # from the total leftward
    assert teacher == pytest.approx(2 * 1_298_761_728 / 2**30, abs=0.05)  # of transformer_1.3b, in bf16
    assert "note: the teacher's forward passes are in no figure of FLOPs" in stdout
    assert "note: adaptation.freeze trains the query affines alone" in stdout
    _, instructed, _ = plan(monkeypatch, capsys, str(ROOT / "configs" / "sft.yaml"), "--show", "1")
    assert "note: task sft has output tokens only where an answer is predicted" in instructed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["precision=fp32"], "GPUs are planned for precision: bf16"),
        (["--gpu", "Abacus"], "--gpu"),
        (["--efficiency", "0"], "--efficiency: must be above 0"),
        (["--nodes", "7", "--gpus-per-node", "7"], "no layout of 49 GPUs is possible"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, stdout, stderr = plan(monkeypatch, capsys, CONFIG, *arguments)
    assert (code, stdout) == (2, "")
    assert message in stderr
    assert stderr.count("\n") == 1
