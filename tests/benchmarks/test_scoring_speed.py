"""The benchmark counts FLOPs exactly and judges shares; its long questions share their texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks import scoring_speed
from benchmarks.scoring_speed import harness_flops, judge, long_requests, plan_flops
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.model.flops import decode_flops, forward_flops
from tests.evaluation.test_data_sources import Rows
from tests.evaluation.tiny_models import save_llama, tiny_orthros

CONTEXT = list(range(100, 140))


def test_flops_of_a_shared_context() -> None:
    """One output token a choice: the context once, then a decoding step's work for each choice."""
    for architecture in ("orthros", "transformer"):
        config = tiny_orthros(architecture).config
        found = plan_flops(config, [(CONTEXT, [1]), ([*CONTEXT[:-1], 7], [2])], share=True)
        assert found == forward_flops(config, [39], []).total + 2 * decode_flops(config, 39).total


def test_flops_without_sharing_are_whole_rows() -> None:
    config = tiny_orthros("transformer").config
    requests = [(CONTEXT, [1, 2]), (CONTEXT, [3, 4, 5]), (CONTEXT, [1, 6])]
    rows = [forward_flops(config, [n]).total for n in (41, 42)]  # the third reads what the first does
    assert harness_flops(config, requests) == sum(rows)
    assert plan_flops(config, requests, share=False) < sum(rows)  # logits where they are needed alone


def test_long_questions_share_their_text(tmp_path: Path) -> None:
    ByteTokenizer().save_pretrained(tmp_path)
    found = long_requests(AutoTokenizer.from_pretrained(tmp_path), 2, 1200, 2)
    assert len(found) == 2 * 2 * 4
    texts = {context.split("\nQuestion:")[0] for context, _ in found}
    assert len(texts) == 2
    assert len({context for context, _ in found}) == 4
    for context, _ in found:
        key = context.rsplit(" of ", 1)[1].removesuffix(" is")
        assert f"The code of {key} is" in context.split("\nQuestion:")[0]


def record(**changes: Any) -> dict[str, Any]:
    base = {"set": "s", "arm": "orthros", "speedup": 2.0, "flop_ratio": 2.4, "share": 0.83}
    return {**base, "largest_difference_to_transformer": 0.0, **changes}


def test_judgement() -> None:
    assert judge([record(), record(arm="hf", share=1.0)], 0.8) == []
    (fault,) = judge([record(share=0.5)], 0.8)
    assert "s, orthros: 2.00 times as fast as hf, FLOPs allow 2.40" in fault
    (fault,) = judge([record(arm="hf", largest_difference_to_transformer=0.5)], 0.8)
    assert "differ" in fault


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"activity_label": "A", "ctx_a": "one", "ctx_b": "two", "endings": ["a b", "c", "d", "e"], "label": "1"}
    monkeypatch.setattr("evaluation.suites.data_sources.PackageSource", lambda cache: Rows([row] * 3))
    output = tmp_path / "speed.json"
    arguments = ["--model", str(save_llama(tmp_path / "llama", max_position_embeddings=2048))]
    arguments += ["--output", str(output), "--documents", "3"]
    small = ["--text-tokens", "1200", "--repeats", "1", "--base-window", "16", "--least-share", "0"]
    assert scoring_speed.main([*arguments, *small]) == 0
    records = json.loads(output.read_text())["records"]
    assert [(each["set"], each["arm"]) for each in records] == [
        (name, arm) for name in ("hellaswag", "long") for arm in ("hf", "transformer", "orthros")
    ]
    assert records[0]["largest_difference_to_transformer"] < 1e-3
    assert all(each["flop_ratio"] > 1 for each in records if each["arm"] != "hf")
    assert "hellaswag hf" in capsys.readouterr().out
