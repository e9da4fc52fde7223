"""The learning rate is a pure function of the step with the promised shape."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_train.config import ScheduleSection
from orthros_train.training.schedule import learning_rate

PEAK = 3e-4


@st.composite
def runs(draw: st.DrawFn) -> tuple[ScheduleSection, int]:
    """A schedule and the number of steps of its run."""
    steps = draw(st.integers(1, 300))
    kind = draw(st.sampled_from(["cosine", "linear", "wsd", "constant"]))
    warmup = draw(st.integers(0, steps))
    longest = max(1, steps - warmup)
    decay = None if kind == "constant" else draw(st.none() | st.integers(1, longest))
    ratio = draw(st.floats(0, 1))
    return ScheduleSection(type=kind, warmup_steps=warmup, decay_steps=decay, min_lr_ratio=ratio), steps


def rates(schedule: ScheduleSection, steps: int) -> list[float]:
    return [learning_rate(schedule, PEAK, steps, step) for step in range(1, steps + 1)]


@given(runs())
def test_shape(run: tuple[ScheduleSection, int]) -> None:
    """Up to the peak in the warm-up, never up again, never below the floor once warm."""
    schedule, steps = run
    values = rates(schedule, steps)
    warmup = schedule.warmup_steps
    assert values[:warmup] == [PEAK * (step / warmup) for step in range(1, warmup + 1)]
    assert all(later <= earlier for earlier, later in pairwise(values[max(0, warmup - 1) :]))
    assert all(value >= PEAK * schedule.min_lr_ratio for value in values[warmup:])
    assert max(values) <= PEAK


@given(runs())
def test_it_ends_at_the_floor(run: tuple[ScheduleSection, int]) -> None:
    schedule, steps = run
    if schedule.type == "constant" or schedule.warmup_steps == steps:
        return
    ended = (
        schedule.decay_steps is None or schedule.type == "wsd" or schedule.warmup_steps + schedule.decay_steps <= steps
    )
    if ended:
        assert learning_rate(schedule, PEAK, steps, steps) == PEAK * schedule.min_lr_ratio


@given(runs(), st.integers(1, 300))
def test_it_depends_on_the_step_alone(run: tuple[ScheduleSection, int], step: int) -> None:
    """Asked out of order or twice, the answer is the same."""
    schedule, steps = run
    step = min(step, steps)
    assert learning_rate(schedule, PEAK, steps, step) == rates(schedule, steps)[step - 1]


@given(runs(), st.integers(1, 5))
def test_more_steps_change_nothing_where_the_decay_has_a_length(run: tuple[ScheduleSection, int], factor: int) -> None:
    schedule, steps = run
    if schedule.type in ("cosine", "linear") and schedule.decay_steps is not None:
        assert rates(schedule, steps * factor)[:steps] == rates(schedule, steps)


def test_cosine_by_hand() -> None:
    schedule = ScheduleSection(type="cosine", warmup_steps=2, min_lr_ratio=0.1)
    expected = [0.5, 1.0] + [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 4)) for n in (1, 2, 3, 4)]
    assert [rate / PEAK for rate in rates(schedule, 6)] == pytest.approx(expected)


def test_linear_with_a_length_stays_at_the_floor() -> None:
    schedule = ScheduleSection(type="linear", decay_steps=4, min_lr_ratio=0.0)
    assert [rate / PEAK for rate in rates(schedule, 6)] == pytest.approx([0.75, 0.5, 0.25, 0, 0, 0])


def test_wsd_by_hand() -> None:
    schedule = ScheduleSection(type="wsd", warmup_steps=2, decay_steps=2, min_lr_ratio=0.0)
    assert [rate / PEAK for rate in rates(schedule, 8)] == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.5, 0])
    tenth = ScheduleSection(type="wsd", min_lr_ratio=0.0)
    assert [round(rate / PEAK, 9) for rate in rates(tenth, 20)] == [1.0] * 18 + [0.5, 0.0]


def test_constant() -> None:
    assert set(rates(ScheduleSection(type="constant"), 9)) == {PEAK}
