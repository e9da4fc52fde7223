"""Segments of one row, found from the EOD token.

A segment is the part of one document inside one row. The EOD token belongs to the document that it
ends, so a segment starts at the row's first token and after every EOD. A label that lies in another
segment is ignored (arXiv 2610.13735 trains on packed documents; the boundary rule is ours).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100


def document_ids(input_ids: NDArray[np.int64], eod_id: int) -> NDArray[np.int64]:
    """Number the segments of a row.

    Args:
        input_ids: (T,) token ids.
        eod_id: the id that ends a document.

    Returns:
        (T,) int64: 0 for the row's first segment, one more for each following one.
    """
    ends = input_ids == eod_id
    return np.cumsum(ends, dtype=np.int64) - ends


def shift_labels(row: NDArray[np.int64], eod_id: int | None) -> NDArray[np.int64]:
    """Label every token with its successor, unless the successor belongs to another segment.

    Args:
        row: (T+1,) token ids; the last one is only ever a label.
        eod_id: the id that ends a document, or None where the whole row is one segment.

    Returns:
        (T,) int64 labels of the first T tokens, `IGNORED_LABEL` after an EOD.
    """
    labels = row[1:].copy()
    if eod_id is not None:
        labels[row[:-1] == eod_id] = IGNORED_LABEL
    return labels
