"""Encoding: EODs, checks of every id, and results that do not depend on the number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from orthros_train.config import TokenizerSection
from orthros_train.data.documents import Batch
from orthros_train.data.encoding import encode_batch, encode_in_order
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError


def batch(*texts: str, source: str = "file") -> Batch:
    numbers = list(range(1, len(texts) + 1))
    return Batch(source, "line", numbers, [text.encode() for text in texts], is_json=False, consumed=7)


class OddTokenizer(ByteTokenizer):
    """A tokenizer that gives the ids it is told to."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__()
        self._ids = ids

    def encode(self, text: str) -> list[int]:
        return self._ids

    def decode(self, ids: Sequence[int]) -> str:
        return ""

    def save_pretrained(self, folder: str | Path) -> None:
        raise NotImplementedError


def test_every_document_ends_with_the_eod_and_blank_ones_are_dropped() -> None:
    encoded = encode_batch(ByteTokenizer(), batch("ab", "", " \n", "c"), "text", np.uint16)
    assert encoded.tokens.tolist() == [97, 98, 257, 99, 257]
    assert encoded.tokens.dtype == np.uint16
    assert encoded.lengths.tolist() == [3, 2]
    assert (encoded.max_token_id, encoded.blank_documents, encoded.text_bytes, encoded.consumed) == (257, 2, 3, 7)


def test_a_batch_of_blank_documents_is_empty() -> None:
    encoded = encode_batch(ByteTokenizer(), batch(" "), "text", np.uint16)
    assert (len(encoded.tokens), len(encoded.lengths), encoded.max_token_id) == (0, 0, -1)


def test_a_spelled_out_eod_is_text() -> None:
    encoded = encode_batch(ByteTokenizer(), batch("a<eos>b"), "text", np.uint16)
    assert np.flatnonzero(encoded.tokens == 257).tolist() == [len("a<eos>b")]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([5, 257, 6], "file, line 1: the text encodes to the end-of-document id 257"),
        ([5, 259], "file, line 1: token id 259 is outside the tokenizer's vocabulary of 259"),
        ([65541], "token id 65541"),  # would wrap to 5 in uint16
        ([-1], "token id -1"),
    ],
)
def test_bad_ids_name_the_document(ids: list[int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        encode_batch(OddTokenizer(ids), batch("x"), "text", np.uint16)


@pytest.mark.parametrize("workers", [1, 2])
def test_results_keep_the_order_and_the_first_error_wins(workers: int) -> None:
    def batches() -> Iterator[Batch]:
        for number in range(12):
            yield batch(str(number), source=f"file{number}")
        yield batch("bad\0", source="bad1")
        yield batch("bad\0", source="bad2")

    encoded = encode_in_order(batches(), TokenizerSection(), "text", np.uint16, workers)
    for number in range(12):
        assert next(encoded).tokens.tolist() == [*str(number).encode(), 257]
    with pytest.raises(InputError, match="bad1, line 1: binary data"):
        next(encoded)


def test_the_input_is_not_read_ahead_without_bound() -> None:
    read = 0

    def batches() -> Iterator[Batch]:
        nonlocal read
        for number in range(100):
            read += 1
            yield batch(str(number))

    encoded = encode_in_order(batches(), TokenizerSection(), "text", np.uint16, 2)
    next(encoded)
    assert read <= 5
    encoded.close()
