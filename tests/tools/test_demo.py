"""tools/demo.py from text to report, with a tiny model; a second call does nothing again."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.demo import training
from evaluation.demo.steps import StepError
from orthros_train.errors import InputError
from tests.tools.command import run
from tests.tools.demo_process import demo_in_this_process

TINY = [
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=2",
    "model.base_window=8",
    "train.steps=4",
    "train.sequence_length=32",
    "schedule.warmup_steps=1",
    "checkpoint.interval_steps=2",
    "evaluation.interval_steps=2",
    "evaluation.samples=8",
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "mine.txt"
    file.write_text("".join(f"line {n} says nothing much, {n % 7} times\n" for n in range(6_000)), encoding="utf-8")
    return file


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The module tools/demo.py; text sampled from its tiny models is made up."""
    return demo_in_this_process("demo", monkeypatch, "MACBETH.\nmade-up text\n")


def test_from_text_to_report(
    demo: dict[str, Any], text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    arguments = ["--text", str(text), "--output", str(output), "--prefill-lengths", "16,32", *TINY]
    assert demo["main"](arguments) == 0
    printed = capsys.readouterr().out
    assert "What this run shows" in printed
    assert "shared weights equal, 32 samples equal" in printed

    report = (output / "report.md").read_text(encoding="utf-8")
    contents = {path.stem: json.loads(path.read_text()) for path in (output / "results").glob("*.json")}
    results = {name: content["result"] for name, content in contents.items()}
    orthros, transformer = results["train-orthros-42"], results["train-transformer-42"]
    equal = results["train-transformer-equal-flops-42"]
    flops = results["fairness-42"]["flops_per_step"]
    assert orthros["tokens_seen"] == transformer["tokens_seen"] == [256, 512, 768, 1024]
    assert orthros["loss_tokens"] == transformer["loss_tokens"]
    assert len(flops["transformer-equal-flops"]) == equal["steps"] > 4
    assert sum(flops["transformer-equal-flops"][:-1]) < sum(flops["orthros"]) <= sum(flops["transformer-equal-flops"])
    for arm in ("orthros", "transformer", "transformer-equal-flops"):
        assert results[f"score-{arm}-42"]["exported_nll"] == pytest.approx(
            results[f"train-{arm}-42"]["validation_nll"], abs=1e-5
        )
        assert f"{results[f'train-{arm}-42']['validation_nll']:.4f}" in report
    assert results["cache-check-42"]["passed"]
    timed = re.findall(r"\| (\w+)[:,] .* UTC \| [\d.]+ s \|", report)
    assert timed == ["Training"] * 3 + ["Times"]
    assert all(content["measured"]["machine"]["cores"] >= 1 for content in contents.values())
    assert f"All {len(results)} steps together took" in report
    assert "Peak learning rate 0.004 in every arm, the rate of configs/demo.yaml, which was chosen on" in report
    assert "one seed: no spread known; `--seeds 42,43,44`" in printed
    assert (output / "report.html").read_text(encoding="utf-8").count("<svg") == 4

    before = {path: path.stat().st_mtime_ns for path in output.rglob("*") if "report" not in path.name}
    assert demo["main"](arguments) == 0
    again = capsys.readouterr().out
    assert "▶" not in again
    assert again.count("(done before)") == len(results)
    changed = [p for p in before if p.stat().st_mtime_ns != before[p] and p.parent.name != "plots" and p.is_file()]
    assert changed == []

    assert demo["main"]([*arguments, "--prefill-lengths", "16"]) == 0  # other lengths are measured, nothing else
    assert re.findall(r"▶ (.*)", capsys.readouterr().out) == ["Times, seed 42"]

    with pytest.raises(InputError, match=r"other settings \(config\).*--output OTHER"):
        demo["main"]([*arguments, "train.steps=5"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seeds", "42,42"], "names a seed twice"),
        (["--seeds", "a"], "not a list of whole numbers"),
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--text", "{tmp}/missing.txt"], "cannot read"),
        (["--prefill-lengths", "0,8"], "--prefill-lengths: 0 is not from 1 to 16351"),
        (["--prefill-lengths", "8,16352"], "--prefill-lengths: 16352 is not from 1 to 16351"),
        (["train.stepz=3"], "train.steps"),
        (["--config", "{tmp}/none.yaml"], "none.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, demo: dict[str, Any], tmp_path: Path) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(InputError, match=re.escape(message)):
        demo["main"](["--output", str(tmp_path / "demo"), *filled])
    assert not (tmp_path / "demo" / "results").exists()
    assert not (tmp_path / "demo" / "settings.json").exists()


def test_a_rate_of_the_users_is_not_called_chosen(demo: dict[str, Any], tmp_path: Path) -> None:
    mine = demo["Demo"](Path("configs/demo.yaml"), ["optimizer.learning_rate=1e-3"], tmp_path, None, 2)
    recipe = mine._recipe()
    assert recipe["learning_rate"] == 1e-3
    assert "chosen" not in recipe["rate_origin"]


def test_a_run_names_the_commit_of_every_attempt(tmp_path: Path) -> None:
    receipt = {"attempt": 2, "commit": "b", "previous": [{"attempt": 1, "commit": "a"}]}
    (tmp_path / "receipt.json").write_text(json.dumps(receipt), encoding="utf-8")
    assert training._commits(tmp_path) == ["a", "b"]


def test_a_failed_training_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(StepError, match=r"ended as not started.*Run again to continue"):
        training.train(Path("configs/demo.yaml"), tmp_path / "run", [], 2)


@pytest.mark.parametrize(("end", "code"), [(KeyboardInterrupt(), 130), (StepError("see above"), 1)])
def test_an_unfinished_demo_ends_in_one_line(
    end: BaseException, code: int, demo: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def stop(self: Any, seeds: list[int], lengths: list[int]) -> None:
        raise end

    monkeypatch.setattr(demo["Demo"], "run", stop)
    assert demo["main"](["--output", str(tmp_path / "demo")]) == code
    assert capfd.readouterr().err.count("\n") == 1


@pytest.mark.evidence
def test_the_command_itself_under_torchrun(text: Path, tmp_path: Path) -> None:
    output = tmp_path / "demo"
    arguments = ["--text", str(text), "--output", str(output), "--prefill-lengths", "16,32", *TINY]
    code, out, err = run("demo", *arguments)
    assert code == 0, err
    assert "What this run shows" in out
    assert (output / "report.html").is_file()
    code, out, err = run("demo", *arguments, "--seeds", "42,43")  # a seed more: only that one is trained
    assert code == 0, err
    assert re.findall(r"▶ Training: (\S+), seed (\d+)", out) == [
        ("transformer", "43"),
        ("orthros", "43"),
        ("transformer-equal-flops", "43"),
    ]
    assert "over 2 seeds" in out
