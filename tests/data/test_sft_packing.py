"""Every conversation once, in rows that hold them, and few of those."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orthros_train.data.sft_packing import one_each, pack


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40), st.text(max_size=3))
@settings(max_examples=60, deadline=None)
def test_each_conversation_once_and_no_row_too_long(lengths: list[int], capacity: int, key: str) -> None:
    packing = pack(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), capacity, key)
    assert sorted(packing.members.tolist()) == list(range(len(lengths)))
    rows = [packing.row(number).tolist() for number in range(len(packing))]
    assert [index for row in rows for index in row] == packing.members.tolist()
    assert all(row for row in rows)
    tokens = packing.sums(np.array(lengths, dtype=np.int64)).tolist()
    assert tokens == [sum(lengths[index] for index in row) for row in rows]
    assert all(total <= capacity for total in tokens)


def test_few_rows() -> None:
    """Within a twentieth of the fewest that the tokens would fill, for lengths as conversations have them."""
    draw = random.Random(0)
    lengths = np.array([min(512, 1 + int(draw.lognormvariate(4.5, 0.8))) for _ in range(2000)])
    packing = pack(np.arange(2000), lengths, 512, "key")
    assert len(packing) <= 1.05 * lengths.sum() / 512


@pytest.mark.parametrize(("lengths", "rows"), [([6, 5, 4, 3, 2], [[0, 2], [1, 3, 4]]), ([10, 1], [[0], [1]]), ([], [])])
def test_by_hand(lengths: list[int], rows: list[list[int]]) -> None:
    """Best fit, longest first, into rows of 10."""
    packing = pack(np.arange(len(lengths)), np.array(lengths, dtype=np.int64), 10, "key")
    assert [packing.row(number).tolist() for number in range(len(packing))] == rows


def test_the_key_alone_draws_the_order() -> None:
    lengths = np.full(40, 5)
    first, again, other = (pack(np.arange(40), lengths, 15, key).members.tolist() for key in ("a", "a", "b"))
    assert first == again != other


def test_without_packing() -> None:
    packing = one_each(np.array([3, 5, 8]))
    assert [packing.row(number).tolist() for number in range(len(packing))] == [[3], [5], [8]]
    assert len(one_each(np.array([], dtype=np.int64))) == 0
