"""The blend: exact shares, never off by a whole sample, the same wherever one starts to look."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_train.data.blend import MAX_BLOCK, Blend, integer_shares, schedule

SHARES = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@given(SHARES)
def test_no_source_is_ever_a_whole_sample_early_or_late(shares: list[int]) -> None:
    order = schedule(shares)
    block = sum(shares)
    assert len(order) == block
    for source, share in enumerate(shares):
        taken = np.cumsum(order == source)
        due = np.arange(1, block + 1) * share / block
        assert np.abs(taken - due).max() < 1 + 1e-9
        assert taken[-1] == share


@given(SHARES, st.integers(0, 500))
def test_counts_are_those_of_a_walk_from_the_start(weights: list[int], index: int) -> None:
    blend = Blend([float(weight) for weight in weights])
    source, count = blend[index]
    assert count == sum(blend[earlier][0] == source for earlier in range(index))


def test_decimal_weights_are_exact() -> None:
    assert integer_shares([0.7, 0.3]) == [7, 3]
    assert integer_shares([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert integer_shares([2.0, 2.0]) == [1, 1]
    assert integer_shares([5.0]) == [1]
    assert integer_shares([1e-05, 0.99999]) == [1, 99999]


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=6))
def test_awkward_weights_are_rounded_to_the_block(weights: list[float]) -> None:
    shares = integer_shares(weights)
    block = sum(shares)
    assert block <= MAX_BLOCK
    assert min(shares) >= 1
    for share, weight in zip(shares, weights, strict=True):
        # rounding, and what sources that would have got nothing take away
        assert math.isclose(share / block, weight / sum(weights), abs_tol=(len(weights) + 1) / MAX_BLOCK)


def test_a_far_index_costs_no_walk() -> None:
    blend = Blend([0.7, 0.3])
    assert blend[10**15] == (blend[0][0], 7 * 10**14)


def test_negative_index_is_an_error() -> None:
    with pytest.raises(IndexError):
        Blend([1.0])[-1]
