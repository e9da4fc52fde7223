"""The benchmark counts FLOPs exactly and judges shares; its long questions share their texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from benchmarks import scoring_speed
from benchmarks.scoring_speed import harness_flops, judge, long_requests, plan_flops
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
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


def test_on_long_texts_every_arm_must_be_faster_than_the_harness() -> None:
    slow = {"speedup": 0.99, "flop_ratio": 1.1, "share": 0.9}
    assert judge([record(**slow)], 0.8) == []  # only the long set shares a prefill
    (fault,) = judge([record(set="long", **slow), record(set="long"), record(set="long", arm="hf", speedup=1.0)], 0.8)
    assert fault == "long, orthros: no faster than hf, though the context's prefill is shared"


def test_speedups_are_of_wall_time_and_paired_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that slows two rounds threefold changes no ratio; processor time stands beside it."""
    wall = {"hf": [2.0, 6.0, 6.0], "transformer": [1.0, 3.0, 3.0], "orthros": [0.5, 1.5, 1.5]}
    processor = {"hf": [2.0] * 3, "transformer": [2.0] * 3, "orthros": [1.0] * 3}
    answers = {arm: [(0.0, True)] for arm in wall}
    monkeypatch.setattr(scoring_speed, "_times", lambda calls, repeats: (answers, wall, processor))
    lm = Mock(model=tiny_orthros("transformer"), _encode_pair=lambda *_: ([1, 2], [3]))
    records = scoring_speed.time_set("s", [("a", "b")], 1, dict.fromkeys(wall, lm), 3)
    assert [each["speedup"] for each in records] == [1.0, 2.0, 4.0]
    assert [each["processor_speedup"] for each in records] == [1.0, 1.0, 2.0]
    assert [each["over_peer"] for each in records] == [1.0, 0.5, 0.25]
    assert records[2]["all_over_peer"] == [0.25] * 3
    assert records[2]["all_speedup"] == [4.0] * 3
    assert records[2]["all_processor_speedup"] == [2.0] * 3
    assert records[2]["all_share"] == [4.0 / records[2]["flop_ratio"]] * 3
    for each in records:
        assert each["share"] == each["speedup"] / each["flop_ratio"]
        assert each["processor_share"] == each["processor_speedup"] / each["flop_ratio"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--device", "bogus"), "device 'bogus' is not known; give cpu"),
        (("--device", "cuda"), "torch sees no CUDA device; use --device cpu"),
        (("--model", "/nonexistent"), "/nonexistent is not a folder"),
        (("--model", "."), "holds no config.json"),
        (("--least-share", "nan"), "must be a finite number that is not negative"),
    ],
)
def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=message):
        scoring_speed.main(["--output", "x.json", *arguments])
    assert not list(tmp_path.iterdir())


def test_a_damaged_model_is_one_line(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InputError, match="cannot load the model in"):
        scoring_speed.main(["--output", str(tmp_path / "x.json"), "--model", str(folder)])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"activity_label": "A", "ctx_a": "one", "ctx_b": "two", "endings": ["a b", "c", "d", "e"], "label": "1"}
    monkeypatch.setattr("evaluation.suites.data_sources.PackageSource", lambda cache: Rows([row] * 3))
    output = tmp_path / "speed.json"
    arguments = ["--model", str(save_llama(tmp_path / "llama", max_position_embeddings=2048))]
    arguments += ["--output", str(output), "--documents", "3"]
    small = ["--text-tokens", "1200", "--repeats", "1", "--base-window", "16", "--least-share", "0"]
    code = scoring_speed.main([*arguments, *small])
    content = json.loads(output.read_text())
    assert code == int(bool(content["faults"]))  # a tiny model may be no faster on long texts
    records = content["records"]
    assert [(each["set"], each["arm"]) for each in records] == [
        (name, arm) for name in ("hellaswag", "long") for arm in ("hf", "transformer", "orthros")
    ]
    assert records[0]["largest_difference_to_transformer"] < 1e-3
    assert all(each["flop_ratio"] > 1 for each in records if each["arm"] != "hf")
    assert "hellaswag hf" in capsys.readouterr().out
