"""Time to first token on a small model: both arms, the FLOP limit, the report, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from evaluation import ttft
from orthros_train.errors import InputError
from orthros_train.model.flops import prefill_flops
from tests.evaluation.tiny_models import save_llama, save_orthros

SHORT = ["--repeats", "1", "--decode-steps", "2"]


def options(*arguments: str) -> list[str]:
    return [*arguments, *SHORT]


def test_both_arms_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    children: list[tuple[str, int]] = []

    def peak(command: list[str], arm: str, length: int) -> float:
        assert command[:1] == ["--model"]
        children.append((arm, length))
        return 0.5

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
    assert "The paper's, not measured here (Table 4" in text
    assert "transformer 77.249 s, Orthros 17.016 s, a ratio of 4.54; decode only" in text
    assert "does not imply faster decoding" in text
    assert (tmp_path / "out" / "ttft.html").is_file()
    assert (tmp_path / "out" / "plots" / "ttft.png").is_file()


def test_peak_memory_grows_with_the_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_orthros(tmp_path / "model")
    common = ["--model", str(model), "--output", str(tmp_path / "x.json"), "--prompt-lengths", "20000"]
    assert ttft.main([*common, "--peak-of", "orthros:20000"]) == 0
    peak = json.loads(capsys.readouterr().out)["peak_memory_gib"]
    least = 20000 * 32 * 4 * 3 / 2**30  # at the very least the residual stream and the cache of a layer
    assert least < peak < 4


def test_where_the_model_may_come_from(tmp_path: Path) -> None:
    llama = save_llama(tmp_path / "llama")
    parse = ttft.build_parser().parse_args
    common = ["--output", str(tmp_path / "x.json"), "--prompt-lengths", "8"]
    arms = ttft.arm_configs(parse(["--model", str(llama), "--base-window", "16", *common]))
    assert (arms["orthros"].base_window, arms["transformer"].base_window) == (16, None)
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
