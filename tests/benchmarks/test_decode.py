"""The decoding benchmark: the caches hold the same, the FLOPs are the counter's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import decode
from benchmarks.decode import filled_cache
from evaluation.benchmarking.llama import filled_llama_cache
from evaluation.benchmarking.models import arm_configs, build_arms
from orthros_train.errors import InputError
from orthros_train.model.flops import decode_flops
from tests.benchmarks.shapes import QUICK
from tests.model.tiny import assert_close


def test_a_step_reads_the_same_from_all_caches() -> None:
    options = decode.build_parser().parse_args(["--output", "x", *QUICK, "--window", "64"])
    configs = arm_configs(options, 64)
    models = build_arms(configs, options.arms, "fp32", "cpu")
    keys, values = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
    token = torch.tensor([3, 5])
    logits = {}
    for arm, model in models.items():
        cache = (
            filled_llama_cache(model.config, keys, values)
            if arm == "llama"
            else filled_cache(model.config, keys, values, room=1)
        )
        logits[arm] = model.decode(token, cache)
        assert cache.get_seq_length() == 21
    assert_close(logits["llama"], logits["transformer"], 1e-5)
    assert_close(logits["orthros"], logits["transformer"], 1e-5)  # the window covers everything


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "decode.json"
    arguments = ["--output", str(output), *QUICK, "--contexts", "70,9", "--batches", "1,3", "--steps", "2", "--profile"]
    assert decode.main(arguments) == 0
    result = json.loads(output.read_text())
    arms = ("transformer", "orthros", "llama")
    assert [record["case"] for record in result["records"]] == [
        f"{arm} {n} x {rows}" for n in (9, 70) for rows in (1, 3) for arm in arms
    ]
    configs = arm_configs(decode.build_parser().parse_args(arguments), 80)
    for record in result["records"]:
        config = configs["orthros" if record["arm"] == "orthros" else "transformer"]
        assert record["flops"] == record["batch"] * decode_flops(config, record["context"]).total
        assert record["tokens_per_second"] == pytest.approx(record["batch"] / record["seconds"])
        assert len(record["all_seconds"]) == 2
    assert set(result["kernels"]) == set(arms)
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["contexts", "batches"])
def test_bad_input(tmp_path: Path, option: str) -> None:
    with pytest.raises(InputError, match=f"--{option} must be at least 1, got 0"):
        decode.main(["--output", str(tmp_path / "x.json"), f"--{option}", "4,0"])
