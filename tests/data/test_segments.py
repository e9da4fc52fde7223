"""Segments against a brute force that walks the row token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from orthros_train.data.segments import IGNORED_LABEL, document_ids, shift_labels

EOD = 3
ROWS = st.lists(st.integers(0, 4), min_size=2, max_size=40)


def brute_force(row: list[int]) -> tuple[list[int], list[int]]:
    """Segment of each token of row[:-1], and each one's label."""
    segments, segment = [], 0
    for token in row:
        segments.append(segment)
        if token == EOD:
            segment += 1
    labels = [
        row[t + 1] if segments[t] == segments[t + 1] else IGNORED_LABEL  # the EOD is in the segment that it ends
        for t in range(len(row) - 1)
    ]
    return segments[:-1], labels


@given(ROWS)
@example([EOD, 1, 2])  # an EOD first
@example([1, 2, EOD])  # an EOD last, as a label only
@example([1, EOD, 2])  # an EOD as the last input token
@example([EOD, EOD, EOD, EOD])  # documents of one token
@example([1, 2])
def test_segments_equal_a_token_by_token_walk(row: list[int]) -> None:
    array = np.array(row, dtype=np.int64)
    segments, labels = brute_force(row)
    ids = document_ids(array[:-1], EOD)
    assert ids.dtype == np.int64
    assert ids.tolist() == segments
    assert shift_labels(array, EOD).tolist() == labels


@given(ROWS)
def test_without_segments_every_token_has_its_successor_as_label(row: list[int]) -> None:
    array = np.array(row, dtype=np.int64)
    assert shift_labels(array, None).tolist() == row[1:]


def test_labels_do_not_alias_the_row() -> None:
    row = np.array([1, EOD, 2], dtype=np.int64)
    shift_labels(row, EOD)
    assert row.tolist() == [1, EOD, 2]
