"""Steps, ranks and micro-batches: every global index once, in an order that no layout changes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orthros_train.data.sampler import batch_indices, rank_micro_batches
from orthros_train.errors import InputError


@given(st.integers(0, 50), st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_ranks_share_a_step_without_overlap(step: int, micro: int, world: int, accumulation: int) -> None:
    size = micro * world * accumulation
    ranks = [rank_micro_batches(step, size, micro, rank, world) for rank in range(world)]
    assert all(len(batches) == accumulation for batches in ranks)
    assert all(len(batch) == micro for batches in ranks for batch in batches)
    in_order = [ranks[rank][m] for m, rank in itertools.product(range(accumulation), range(world))]
    assert [index for batch in in_order for index in batch] == list(batch_indices(step, size))


def test_steps_follow_each_other() -> None:
    steps = itertools.chain.from_iterable(batch_indices(step, 6) for step in range(4))
    assert list(steps) == list(range(24))


def test_an_indivisible_batch_names_the_options() -> None:
    with pytest.raises(InputError, match=r"train.global_batch_size 10 .* multiple of 4"):
        rank_micro_batches(0, 10, 2, 0, 2)
