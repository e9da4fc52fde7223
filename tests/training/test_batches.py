"""Batches of this rank: prepared ahead, counted, and handed out in order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from orthros_train.data import collate
from orthros_train.errors import InputError
from orthros_train.parallel.mesh import Mesh
from orthros_train.training.batches import BatchLoader, count_valid, segment_lengths, split_evenly
from tests.training.small_runs import small_config

T = 6


class CountingData:
    """Sample i holds the number i everywhere; its first i % 3 labels are ignored."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def sample(self, index: int) -> Any:
        if index == self.fails_at:
            raise InputError(f"sample {index} is broken")
        labels = np.full(T, index)
        labels[: index % 3] = -100
        return SimpleNamespace(input_ids=np.full(T, index), shift_labels=labels, document_ids=np.arange(T) // 4)

    def output_count(self, index: int) -> None:
        return None


def never() -> bool:
    return False


@pytest.mark.parametrize("prefetch_steps", [0, 1, 3])
def test_steps_come_in_order_from_any_start(tmp_path: Path, corpus: Path, prefetch_steps: int) -> None:
    config = small_config(tmp_path, corpus, data__prefetch_steps=prefetch_steps)
    loader = BatchLoader(CountingData(), config, Mesh(data_size=2, data_rank=1), first_step=5)
    try:
        for step in (5, 6, 7):
            batch, waited = loader.take(never)
            assert batch is not None
            assert waited >= 0
            found = [micro["input_ids"][:, 0].tolist() for micro in batch.micro_batches]
            first = step * 8
            assert found == [[first + 2, first + 3], [first + 6, first + 7]]
            indices = [index for micro in found for index in micro]
            assert batch.valid_labels == sum(T - index % 3 for index in indices)
            assert batch.segment_lengths == [4, 2] * 4
    finally:
        loader.close()


@pytest.mark.parametrize("prefetch_steps", [0, 2])
def test_an_error_in_the_data_reaches_the_training(tmp_path: Path, corpus: Path, prefetch_steps: int) -> None:
    config = small_config(tmp_path, corpus, data__prefetch_steps=prefetch_steps)
    loader = BatchLoader(CountingData(fails_at=9), config, Mesh(), first_step=0)
    assert loader.take(never)[0] is not None
    with pytest.raises(InputError, match="sample 9 is broken"):
        loader.take(never)
    loader.close()


def test_segment_lengths() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    documents = torch.tensor([[0, 0, 1, 1, 1], [3, 2, 2, 2, 3]])
    assert segment_lengths({"input_ids": ids, "document_ids": documents}) == [2, 3, 1, 3, 1]
    assert segment_lengths({"input_ids": ids}) == [5, 5]


@pytest.mark.parametrize(("count", "micro", "world"), [(7, 2, 2), (1, 4, 3), (8, 2, 2), (5, 3, 1)])
def test_split_evenly_covers_each_sample_once(count: int, micro: int, world: int) -> None:
    """Every rank has equally many, equally shaped batches; what fills up carries no label."""
    shares = [
        list(split_evenly(CountingData(), count, micro, Mesh(data_size=world, data_rank=rank))) for rank in range(world)
    ]
    assert len({len(share) for share in shares}) == 1
    batches = [batch for share in shares for batch in share]
    assert {tuple(batch["input_ids"].shape) for batch in batches} == {(micro, T)}
    labeled = [
        int(row[0]) for b in batches for row, ok in zip(b["input_ids"], b["shift_labels"], strict=True) if ok.max() >= 0
    ]
    assert sorted(labeled) == list(range(count))
    whole = collate([CountingData().sample(index) for index in range(count)])
    assert sum(count_valid(batch) for batch in batches) == count_valid(whole)
