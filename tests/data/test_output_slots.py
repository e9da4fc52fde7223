"""M of each micro-batch: from the plan alone, one number a step."""

from __future__ import annotations

import pytest

from orthros_train.data.output_slots import output_slots, step_output_slots
from orthros_train.data.pretraining import Sample

T = 100


class Plan:
    """Samples of which nothing is known but the number of outputs."""

    fingerprint, epoch_sizes = "", (1,)

    def __init__(self, *counts: int | None) -> None:
        self.counts = counts

    def sample(self, index: int) -> Sample:
        raise AssertionError("read")

    def output_count(self, index: int) -> int | None:
        return self.counts[index % len(self.counts)]


def slots(plan: Plan, samples_per_pass: int, same_in_step: bool = False, multiple: int = 8) -> list[int | None]:
    return step_output_slots(
        plan,
        1,
        global_batch_size=8,
        samples_per_pass=samples_per_pass,
        multiple=multiple,
        sequence_length=T,
        same_in_step=same_in_step,
    )


@pytest.mark.parametrize(
    ("counts", "multiple", "expected"),
    [
        ([3, 9, 1], 8, 16),
        ([8], 8, 8),
        ([1], 128, T),
        ([T, 1], 8, T),
        ([3, None], 8, None),
        ([None], 8, None),
        ([3], 1, 3),
    ],
)
def test_of_a_batch(counts: list[int | None], multiple: int, expected: int | None) -> None:
    assert output_slots(Plan(*counts), range(len(counts)), multiple, T) == expected


def test_one_number_for_the_conversations_of_a_step() -> None:
    """The largest is in the second step's last pass; the first step's, in reach of another step, does not count."""
    plan = Plan(99, *[3] * 7, *[3] * 7, 20)
    assert slots(plan, 2) == [24] * 4
    assert slots(plan, 8) == [24]


def test_mixed_steps() -> None:
    plan = Plan(3, 9, 4, None, None, None, None, None)
    assert slots(plan, 2) == [16, None, None, None]
    assert slots(plan, 1) == [16, 16, 16, *[None] * 5]
    assert slots(plan, 4) == [None, None]
    assert slots(plan, 2, same_in_step=True) == [None] * 4
    assert slots(Plan(None), 2) == [None] * 4
    assert slots(Plan(3, 9), 2, same_in_step=True) == [16] * 4
