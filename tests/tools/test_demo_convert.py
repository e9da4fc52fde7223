"""tools/demo_convert.py from a source model to the report, with a tiny model; a second call does nothing again."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from evaluation.demo import wikipedia
from orthros_train.conversion import smollm2
from orthros_train.errors import InputError
from tests.evaluation.tiny_models import save_llama
from tests.tools.demo_process import demo_in_this_process

TINY = [
    "model.vocab_size=320",
    "model.hidden_size=32",
    "model.intermediate_size=48",
    "model.num_hidden_layers=2",
    "model.num_attention_heads=4",
    "model.num_key_value_heads=2",
    "model.max_position_embeddings=2048",
    "model.rms_norm_eps=1e-6",
    "model.rope_theta=10000.0",
    "model.tie_word_embeddings=false",
    "model.base_window=16",
    "train.steps=4",
    "train.sequence_length=64",
    "schedule.warmup_steps=1",
    "precision=fp32",
]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The module with a tiny source model and made-up articles of which the shortest are not held out."""
    source = save_llama(tmp_path_factory.mktemp("source"), num_hidden_layers=2, max_position_embeddings=2048)
    words = random.Random(0).choices(["river", "stone", "bird", "of", "the", "a", "runs", "sings"], k=4_000)
    articles = {f"article {n}": " ".join(words[n : n + 100 + 50 * n]) for n in range(12)}
    monkeypatch.setattr(smollm2, "smollm2_folder", lambda cache: source)
    monkeypatch.setattr(wikipedia, "wikipedia_articles", lambda cache: articles)
    return demo_in_this_process("demo_convert", monkeypatch)


def test_from_a_source_model_to_the_report(
    demo: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "demo"
    arguments = ["--output", str(output), "--ranks", "1", *TINY]  # scoring with more threads would bar later forks
    assert demo["main"](arguments) == 0
    printed = capsys.readouterr().out
    assert "What this run shows" in printed

    contents = {path.stem: json.loads(path.read_text()) for path in (output / "results").glob("*.json")}
    results = {name: content["result"] for name, content in contents.items()}
    report = (output / "report.md").read_text(encoding="utf-8")
    held_out = results["text"]["rows"]
    trained = {json.loads(line)["name"] for line in (output / "data" / "train.jsonl").read_text().splitlines()}
    assert held_out
    assert all(len(row) == 1025 for row in held_out.values())
    assert not trained & held_out.keys()
    assert len(trained) == results["text"]["train_documents"] == 12 - results["text"]["validation_documents"]

    runs = {arm: results[f"train-{arm}-42"] for arm in ("transformer", "orthros-0-sinks", "orthros-1-sink")}
    assert len({tuple(run["loss_tokens"]) for run in runs.values()}) == 1
    for arm, run in runs.items():
        before, after = (results[f"nll-{when}-{arm}"]["nll"] for when in ("before", "after"))
        assert len(before) == len(held_out)
        assert before != after
        assert f"{sum(map(sum, [row[512:] for row in after])) / (512 * len(after)):.4f}" in report
        assert run["steps"] == 4
    inside = [[row[:16] for row in results[f"nll-before-{arm}"]["nll"]] for arm in runs]
    for other in inside[1:]:  # the window covers these: an untrained conversion is its source
        assert all(a == pytest.approx(b, abs=1e-4) for a, b in zip(inside[0], other, strict=True))
    assert results["cache-check"]["passed"]
    assert len(results["samples"]["samples"]) == 6
    assert results["samples"]["prompt_tokens"] == 400
    assert (output / "report.html").read_text(encoding="utf-8").count("<svg") == 2

    assert demo["main"](arguments) == 0
    again = capsys.readouterr().out
    assert "▶" not in again
    with pytest.raises(InputError, match=r"other settings \(config\).*--output OTHER"):
        demo["main"]([*arguments, "train.steps=5"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.base_window=1024"], "model.base_window is 1024; give a window below 1024"),
        (["model.base_window=null", "model.base_sinks=0"], "model.base_window is None"),
        (["train.stepz=3"], "train.steps"),
        (["--config", "{tmp}/none.yaml"], "none.yaml"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, demo: dict[str, Any], tmp_path: Path) -> None:
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    with pytest.raises(InputError, match=re.escape(message)):
        demo["main"](["--output", str(tmp_path / "demo"), *filled])
    assert not (tmp_path / "demo").exists()
