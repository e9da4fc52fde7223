"""The keyed permutation: a bijection, another one for each key, without visible structure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_train.data.permutation import Permutation


@given(st.integers(1, 700), st.text(max_size=8))
def test_is_a_bijection(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation[k] for k in range(size)) == list(range(size))


def test_does_not_change_between_versions() -> None:
    assert [Permutation(10, "42/train/rows/0/0")[k] for k in range(10)] == [7, 3, 6, 5, 9, 4, 0, 1, 8, 2]
    assert Permutation(10**12, "x")[0] == 359894525001


def test_each_value_is_equally_likely_at_each_place() -> None:
    size, keys = 6, 6000
    counts = np.zeros((size, size))
    for key in range(keys):
        permutation = Permutation(size, str(key))
        for k in range(size):
            counts[k, permutation[k]] += 1
    expected = keys / size
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 60  # 25 degrees of freedom: beyond 60 once in 10,000 draws


def test_neighbors_are_scattered() -> None:
    size = 100_000
    permutation = Permutation(size, "key")
    values = np.array([permutation[k] for k in range(2000)])
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.1
    assert abs(values.mean() / size - 0.5) < 0.03


@pytest.mark.parametrize("k", [-1, 5])
def test_outside_the_range_is_an_error(k: int) -> None:
    with pytest.raises(IndexError):
        Permutation(5, "key")[k]


def test_empty_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, "key")
