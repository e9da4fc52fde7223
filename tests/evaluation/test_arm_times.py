"""Times are taken in turn after a warm-up, medians are medians, and the FLOPs are the counter's."""

from __future__ import annotations

from typing import Any

import pytest

from evaluation import arm_times
from orthros_train.model.flops import decode_flops, prefill_flops, training_flops
from orthros_train.model.kv_cache import KVCacheLayer
from tests.model.tiny import tiny_model


def models() -> dict[str, Any]:
    return {"orthros": tiny_model(), "transformer": tiny_model(architecture="transformer", query_affine="none")}


def test_arms_are_measured_in_turn_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = iter(range(1000))
    monkeypatch.setattr(arm_times.time, "perf_counter", lambda: float(next(clock)))
    seconds = arm_times.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, repeats=2)
    assert calls == ["a", "b"] * 3
    assert seconds == {"a": [1.0, 1.0], "b": [1.0, 1.0]}


def test_prefill_records() -> None:
    arms = models()
    records = arm_times.measure_prefill(arms, [4, 9], repeats=3)
    assert [(record["arm"], record["length"]) for record in records] == [
        ("orthros", 4),
        ("transformer", 4),
        ("orthros", 9),
        ("transformer", 9),
    ]
    for record in records:
        assert record["seconds"] == sorted(record["all_seconds"])[1] > 0
        assert record["flops"] == prefill_flops(arms[record["arm"]].config, record["length"]).total


def test_decode_records() -> None:
    arms = models()
    records = arm_times.measure_decode(arms, [6], steps=4)
    assert {record["arm"]: record["flops"] for record in records} == {
        name: decode_flops(model.config, 6).total for name, model in arms.items()
    }
    assert all(record["seconds"] > 0 and len(record["all_seconds"]) == 4 for record in records)


def test_no_timed_step_copies_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room is made in the prefill, once a layer, whatever the number of steps."""
    grown: list[int] = []
    grow = KVCacheLayer.grow
    monkeypatch.setattr(KVCacheLayer, "grow", lambda layer, size: (grown.append(size), grow(layer, size)))
    arms = models()
    arm_times.measure_decode(arms, [6], steps=400)
    assert grown == [448] * 2 * 3  # both arms' layers; 6 + 1 + 400 in multiples of 64


def test_training_records() -> None:
    arms = models()
    before = {name: parameter.clone() for name, parameter in arms["orthros"].named_parameters()}
    records = arm_times.measure_training(arms, rows=2, length=12, repeats=2)
    assert {record["arm"]: record["flops"] for record in records} == {
        name: 2 * training_flops(model.config, [12]).total for name, model in arms.items()
    }
    assert all(record["seconds"] > 0 and len(record["all_seconds"]) == 2 for record in records)
    assert all(parameter.equal(before[name]) for name, parameter in arms["orthros"].named_parameters())
    assert all(parameter.grad is None for parameter in arms["orthros"].parameters())
