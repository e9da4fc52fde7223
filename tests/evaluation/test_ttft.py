"""Time to first token on a small model: both arms, the FLOP limit, the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from evaluation import arm_times, ttft
from evaluation.model_source import load_evaluated_model
from orthros_train.errors import InputError
from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.flops import prefill_flops
from tests.evaluation.tiny_models import save_llama, save_orthros

SHORT = ["--repeats", "1", "--decode-steps", "2"]


def options(*arguments: str) -> list[str]:
    return [*arguments, *SHORT]


def test_both_arms_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children: list[tuple[str, int]] = []

    def peak(command: list[str], arm: str, length: int) -> dict[str, float]:
        assert command[:1] == ["--model"]
        children.append((arm, length))
        return {"peak_memory_gib": 0.5}

    monkeypatch.setattr(ttft, "_peak_in_child", peak)
    model, output = save_orthros(tmp_path / "model"), tmp_path / "out" / "ttft.json"
    assert ttft.main(options("--model", str(model), "--prompt-lengths", "8,300", "--output", str(output))) == 0
    results = json.loads(output.read_text())
    assert (results["batch"], results["concurrency"], results["base_window"]) == (1, 1, 5)
    assert [(record["arm"], record["prompt_length"]) for record in results["records"]] == children == [
        ("transformer", 8), ("orthros", 8), ("transformer", 300), ("orthros", 300)
    ]  # fmt: skip
    for record in results["records"]:
        assert record["ttft_seconds"] > 0
        assert record["decode_tokens_per_second"] > 0
    arms = ttft.arm_configs(ttft.build_parser().parse_args(
        options("--model", str(model), "--prompt-lengths", "8,300", "--output", str(output))))  # fmt: skip
    assert arms["transformer"].max_position_embeddings >= 303
    expected = prefill_flops(arms["transformer"], 300).total / prefill_flops(arms["orthros"], 300).total
    assert results["ratios"][1]["flops"] == pytest.approx(expected)
    text = capsys.readouterr().out
    assert "| 128K | paper, transformer | 77.249 |  |  | 33.3 | – |" in text
    assert "| 128K | paper, orthros | 17.016 | 4.54 |  | 33.7 | – |" in text
    assert "The rows marked paper are the paper's (arXiv 2610.13735, Table 4" in text
    assert "not measured here" in text
    assert "do not imply faster decoding" in text
    assert results["paper"]["ttft_seconds"] == {"transformer": 77.249, "orthros": 17.016}
    assert results["paper"]["decode_tokens_per_second"] == {"transformer": 33.3, "orthros": 33.7}
    assert "not measured here" in results["paper"]["origin"]
    assert "Left out" not in text
    assert (tmp_path / "out" / "ttft.html").is_file()
    assert (tmp_path / "out" / "plots" / "ttft.png").is_file()


def test_peak_memory_grows_with_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_orthros(tmp_path / "model")
    common = ["--model", str(model), "--output", str(tmp_path / "x.json"), "--prompt-lengths", "20000"]
    assert ttft.main([*common, "--peak-of", "orthros:20000"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_memory_gib"]
    least = 20000 * 32 * 4 * 3 / 2**30  # at the very least the residual stream and the cache of a layer
    assert least < peak < 4


def test_outputs_in_one_folder_have_plots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ttft, "_peak_in_child", lambda *_: {"peak_memory_gib": 0.5})
    model = save_orthros(tmp_path / "model")
    plots = {"first": "first", "a (second) höhe": "a__second__h_he"}
    for name, plot in plots.items():
        output = tmp_path / f"{name}.json"
        assert ttft.main(options("--model", str(model), "--prompt-lengths", "8", "--output", str(output))) == 0
        assert f"(plots/{plot}.png)" in output.with_suffix(".md").read_text()
        assert "<svg" in output.with_suffix(".html").read_text()
    assert {path.stem for path in (tmp_path / "plots").iterdir()} == set(plots.values())


def little_memory(monkeypatch: pytest.MonkeyPatch, least: int, phase: str) -> None:
    """Prefill or decoding after `least` tokens and more does not fit."""
    measured = getattr(arm_times, phase)

    def measure(models: Any, lengths: list[int], *arguments: Any) -> Any:
        if lengths[0] >= least:
            raise torch.OutOfMemoryError("no room")
        return measured(models, lengths, *arguments)

    monkeypatch.setattr(arm_times, phase, measure)
    monkeypatch.setattr(ttft, "_peak_in_child", lambda *_: {"peak_memory_gib": 0.5})


@pytest.mark.parametrize("phase", ["measure_prefill", "measure_decode"])
def test_lengths_that_were_measured_outlast_one_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], phase: str
) -> None:
    little_memory(monkeypatch, 16, phase)
    model, output = save_orthros(tmp_path / "model"), tmp_path / "ttft.json"
    command = options("--model", str(model), "--output", str(output))
    assert ttft.main([*command, "--prompt-lengths", "8,16,4000"]) == 1
    results = json.loads(output.read_text())
    assert [record["prompt_length"] for record in results["records"]] == [8, 8]
    assert [ratio["prompt_length"] for ratio in results["ratios"]] == [8]
    assert results["left_out"]["prompt_lengths"] == [16, 4000]
    assert "prompts of 16, 4,000 tokens: cpu has too little memory for this; use shorter" in capsys.readouterr().out
    output.unlink()
    with pytest.raises(InputError, match="too little memory for this; use shorter --prompt-lengths"):
        ttft.main([*command, "--prompt-lengths", "16,17"])
    assert not output.exists()


def test_times_outlast_a_peak_that_cannot_be_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any, what: str) -> Any:
        raise InputError(f"{what} cannot be measured: exit code -9, killed")

    monkeypatch.setattr(ttft, "in_own_process", fail)
    model, output = save_orthros(tmp_path / "model"), tmp_path / "ttft.json"
    assert ttft.main(options("--model", str(model), "--prompt-lengths", "8", "--output", str(output))) == 1
    record = json.loads(output.read_text())["records"][0]
    assert (record["peak_memory_gib"], record["ttft_seconds"] > 0) == (None, True)
    assert "Left out: the peak memory of transformer at 8 tokens cannot be measured" in capsys.readouterr().out


def test_memory_for_a_peak_that_does_not_suffice_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(OrthrosForCausalLM, "prefill", refuse)
    command = ["--model", str(save_orthros(tmp_path / "model")), "--output", str(tmp_path / "x.json")]
    with pytest.raises(InputError, match="cpu has too little memory for this; use shorter --prompt-lengths"):
        ttft.main([*command, "--prompt-lengths", "8", "--peak-of", "orthros:8"])


def test_where_the_model_may_come_from(tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    parse = ttft.build_parser().parse_args
    common = ["--output", str(tmp_path / "x.json"), "--prompt-lengths", "8"]
    arms = ttft.arm_configs(parse(["--model", str(llama), "--base-window", "16", *common]))
    assert (arms["orthros"].base_window, arms["transformer"].base_window) == (16, None)
    evaluated = load_evaluated_model(llama, base_window=16).model.config
    assert arms["orthros"].base_sinks == evaluated.base_sinks == 1
    assert arms["transformer"].base_sinks == load_evaluated_model(llama).model.config.base_sinks == 0
    with pytest.raises(InputError, match="needs a window: pass --base-window"):
        ttft.arm_configs(parse(["--model", str(llama), *common]))
    recipe = Path(__file__).parents[2] / "configs" / "orthros_1.3b.yaml"
    arms = ttft.arm_configs(parse(["--config", str(recipe), *common]))
    window = yaml.safe_load(recipe.read_text())["model"]["base_window"]
    assert (arms["orthros"].base_window, arms["orthros"].hidden_size) == (window, 2048)
    assert arms["transformer"].architecture == "transformer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "absent"], "absent is not a folder"),
        (["--config", "absent.yaml"], "absent.yaml"),
        (["--model", "absent", "--device", "cuda"], "torch sees no CUDA device"),
        (["--model", "absent", "--prompt-lengths", "0"], "must be at least 1"),
        ([], "one of the arguments --model --config is required"),
        (["--model", "absent", "--peak-of", "orthros"], "argument --peak-of: 'orthros' is not an arm and a length"),
        (["--model", "absent", "--peak-of", "hf:8"], "argument --peak-of: 'hf:8' is not an arm and a length"),
        (["--model", "absent", "--peak-of", "orthros:x"], "argument --peak-of: 'orthros:x' is not an arm"),
        (["--model", "absent", "--peak-of", "llama:8"], "--peak-of llama: the arms are transformer and orthros"),
    ],
)
def test_bad_input(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        ttft.main([*arguments, "--output", str(tmp_path / "x.json")])


@pytest.mark.evidence
def test_the_command_with_its_children(tmp_path: Path) -> None:
    model, output = save_orthros(tmp_path / "model"), tmp_path / "ttft.json"
    assert ttft.main(options("--model", str(model), "--prompt-lengths", "4000", "--output", str(output))) == 0
    results = json.loads(output.read_text())
    assert all(record["peak_memory_gib"] > 0 for record in results["records"])


def test_an_output_or_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    folder = save_orthros(tmp_path / "model")
    with pytest.raises(InputError, match=r"t\.md is the JSON file"):
        ttft.main(["--model", str(folder), "--output", str(tmp_path / "t.md"), "--prompt-lengths", "8"])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "abc"}))
    with pytest.raises(InputError, match=f"cannot load the model in {folder}"):
        ttft.main(["--model", str(folder), "--output", str(tmp_path / "t.json"), "--prompt-lengths", "8"])
