"""Conversations and text in one order."""

from __future__ import annotations

from typing import Any, cast

import pytest

from orthros_train.data.mixed import MixedData

STEP = 10


class Numbered:
    """Sample i is (name, i)."""

    def __init__(self, name: str, outputs: int | None) -> None:
        self.fingerprint, self.epoch_sizes, self._outputs = name, (7,), outputs

    def sample(self, index: int) -> Any:
        return self.fingerprint, index

    def output_count(self, index: int) -> int | None:
        return self._outputs


def mixed(weights: tuple[float, float], step: int = STEP) -> MixedData:
    return MixedData(cast(Any, Numbered("sft", 3)), cast(Any, Numbered("text", None)), weights, step)


@pytest.mark.parametrize(("weights", "shares"), [((1.0, 1.0), 5), ((0.3, 0.7), 3), ((4.0, 1.0), 8)])
def test_every_step_has_its_share_conversations_first(weights: tuple[float, float], shares: int) -> None:
    data = mixed(weights)
    for step in range(20):
        kinds = [data.place(index)[0] for index in range(step * STEP, (step + 1) * STEP)]
        assert kinds == [0] * shares + [1] * (STEP - shares)


def test_each_data_set_is_read_in_its_own_order() -> None:
    data = mixed((0.31, 0.69))
    read: dict[str, list[int]] = {"sft": [], "text": []}
    for index in range(1000):
        name, number = cast(Any, data.sample(index))
        read[name].append(number)
        assert data.output_count(index) == (3 if name == "sft" else None)
    assert read == {"sft": list(range(310)), "text": list(range(690))}


def test_what_a_step_holds_does_not_depend_on_the_way_there() -> None:
    forward = [mixed((1.0, 2.0)).place(index) for index in range(200)]
    data = mixed((1.0, 2.0))
    assert [data.place(index) for index in reversed(range(200))] == forward[::-1]


def test_identity() -> None:
    data = mixed((1.0, 2.0))
    assert data.epoch_sizes == (7, 7)
    assert data.fingerprint == mixed((2.0, 4.0)).fingerprint
    assert len({data.fingerprint, mixed((1.0, 3.0)).fingerprint, mixed((1.0, 2.0), 20).fingerprint}) == 3
