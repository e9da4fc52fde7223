"""Pretraining samples: a pure function of the global index, over any number of epochs and sources.

    index -> blend -> (source, n-th of that source) -> (epoch, k) -> permutation(seed, source, epoch)[k] -> row

* The order depends on data, split, sequence length and seed alone: not on train.steps, ranks or micro-batch size.
* Each epoch of a source visits each of its rows once, in an order of its own.
* Train, validation and test are ranges of each source's documents, cut as megatron-core cuts them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from orthros_train.config import Config, DataSection, DataSource
from orthros_train.data.corpus import Corpus, open_corpus
from orthros_train.data.input_files import CACHE_SUFFIX
from orthros_train.data.manifest import bin_path
from orthros_train.data.permutation import seed32
from orthros_train.data.sample_order import SampleOrder
from orthros_train.data.segments import IGNORED_LABEL, document_ids, shift_labels
from orthros_train.data.tokenizers import Tokenizer
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from orthros_train.data.packed_rows import PackedRows

SplitName = Literal["train", "validation", "test"]
_SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
_ORDER_VERSION = 1  # of the map from index to sample; part of the fingerprint


class SplitTooSmallError(InputError):
    """A source has too few documents or tokens in the split for one sample."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of T tokens.

    Attributes:
        input_ids: (T,) int64.
        shift_labels: (T,) int64, the next token of each, -100 where it lies in another segment.
        document_ids: (T,) int64, another value in each segment; None (data.document_mask off): the row is one segment.
    """

    input_ids: NDArray[np.int64]
    shift_labels: NDArray[np.int64]
    document_ids: NDArray[np.int64] | None


class PretrainingData:
    """The samples of one split. `sample` may be called from several threads.

    Args:
        config: its data, model.vocab_size, train.sequence_length and train.seed are read.
        tokenizer: the run's.
        split: which share of the documents. With `data.validation` named, validation is all of those sources, and the
            validation share of the training sources stays with training.

    Attributes:
        fingerprint: SHA-256 of all that decides which tokens sample i holds.
        epoch_sizes: samples that one epoch of each source has.

    Raises:
        InputError: a corpus is refused by `open_corpus`, a validation source is also trained on, or the cache cannot be
            written.
        SplitTooSmallError: a source has less than one sample in this split.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, split: SplitName) -> None:
        from orthros_train.data.packed_rows import PackedRows  # noqa: PLC0415 (imports megatron-core: seconds)

        self._length = config.train.sequence_length
        self._eod_id = tokenizer.eod_id if config.data.document_mask else None
        self._key = f"{config.train.seed}/{split}"
        sources = _sources(config.data, split)
        shares = split_shares(config.data.split, config.data.validation is not None, split)
        self._vocab_size = vocab_size = config.model.vocab_size or tokenizer.vocab_size
        cache_dir = _cache_dir(config.data, sources)
        self._prefixes = [source.prefix for source in sources]
        self._rows: list[PackedRows] = []
        records = []
        for number, source in enumerate(sources):
            corpus = open_corpus(source.prefix, tokenizer, vocab_size)
            documents = split_documents(corpus.manifest.documents, shares, split)
            _require_one_sample(corpus, documents, self._length, split)
            seed = seed32(f"{self._key}/documents/{number}")
            self._rows.append(PackedRows(corpus, documents, self._length, seed, cache_dir))
            records.append([corpus.manifest.bin.sha256, documents.start, documents.stop])
        self.epoch_sizes = tuple(len(rows) for rows in self._rows)
        self._order = SampleOrder([source.weight for source in sources], self.epoch_sizes, f"{self._key}/rows")
        identity = [_ORDER_VERSION, self._key, self._length, self._eod_id, self._order.shares, records]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0 of the split's endless order."""
        source, _, number = self.sample_id(index)
        row = self._rows[source].row(number)
        if row.max() >= self._vocab_size or row.min() < 0:
            raise InputError(
                f"{self._prefixes[source]}.bin holds token id {int(row.max())}, but the vocabulary ends at "
                f"{self._vocab_size - 1}: the file was changed after preprocessing; write it again"
            )
        input_ids = row[:-1]
        return Sample(
            input_ids=input_ids,
            shift_labels=shift_labels(row, self._eod_id),
            document_ids=None if self._eod_id is None else document_ids(input_ids, self._eod_id),
        )

    def sample_id(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, row of the source) of sample `index`: what it holds, without reading it."""
        return self._order[index]

    def output_count(self, index: int) -> None:
        """None: every sample has an output token at every position."""


def collate(samples: Sequence[Sample], output_slots: int | None = None) -> dict[str, torch.Tensor]:
    """Stack samples into a micro-batch.

    Args:
        samples: of equal length T.
        output_slots: M, at least the labels of any sample: output tokens stand where the labels are, and -1 fills up.
            None: an output token at every position.

    Returns:
        input_ids (B, T), shift_labels (B, T or M), with `output_slots` output_positions (B, M), and document_ids (B, T)
        unless every row is one segment, whose attention is cheaper to lay out: int64.
    """
    import torch  # noqa: PLC0415 (takes seconds, and samples do not need it)

    batch = {"input_ids": torch.from_numpy(np.stack([sample.input_ids for sample in samples]))}
    if output_slots is None:
        batch["shift_labels"] = torch.from_numpy(np.stack([sample.shift_labels for sample in samples]))
    else:
        positions = np.full((len(samples), output_slots), -1, dtype=np.int64)
        labels = np.full_like(positions, IGNORED_LABEL)
        for row, sample in enumerate(samples):
            columns = np.flatnonzero(sample.shift_labels != IGNORED_LABEL)
            positions[row, : len(columns)] = columns
            labels[row, : len(columns)] = sample.shift_labels[columns]
        batch["output_positions"], batch["shift_labels"] = torch.from_numpy(positions), torch.from_numpy(labels)
    ids = np.stack([np.zeros_like(s.input_ids) if s.document_ids is None else s.document_ids for s in samples])
    if (ids[:, 1:] != ids[:, :-1]).any():
        batch["document_ids"] = torch.from_numpy(ids)
    return batch


def split_documents(documents: int, shares: Sequence[float], split: SplitName) -> range:
    """The documents of one split: consecutive ranges in the ratio of `shares`, rounded as megatron-core rounds them."""
    total = sum(shares)
    ends = [0.0, *accumulate(share / total for share in shares)]
    number = _SPLITS.index(split)
    return range(round(ends[number] * documents), round(ends[number + 1] * documents))


def _sources(data: DataSection, split: SplitName) -> list[DataSource]:
    if not data.train:
        raise InputError("data.train names no source; add one, for example data.train=[{prefix: data/text}]")
    if data.validation is None or split != "validation":
        return data.train
    trained = {bin_path(Path(source.prefix)).resolve() for source in data.train}
    for source in data.validation:
        if bin_path(Path(source.prefix)).resolve() in trained:
            raise InputError(
                f"data.validation names {source.prefix}, which data.train trains on; remove it from one of them, or "
                "leave data.validation out and use data.split"
            )
    if not data.validation:
        raise InputError("data.validation is empty; name a source or leave it out")
    return data.validation


def split_shares(
    shares: tuple[float, float, float], validation_named: bool, split: SplitName
) -> tuple[float, float, float]:
    """Train, validation and test shares of the sources of `split`, whose own are `shares` unless validation sources are
    named: those are all validation, and the training sources' validation share stays with training."""
    if not validation_named:
        return shares
    return (0.0, 1.0, 0.0) if split == "validation" else (shares[0] + shares[1], 0.0, shares[2])


def _cache_dir(data: DataSection, sources: list[DataSource]) -> Path:
    return Path(data.cache_dir if data.cache_dir is not None else f"{sources[0].prefix}{CACHE_SUFFIX}")


def _require_one_sample(corpus: Corpus, documents: range, sequence_length: int, split: SplitName) -> None:
    tokens = int(corpus.lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if tokens < sequence_length + 1:
        name = "data.validation" if split == "validation" else "more documents"
        raise SplitTooSmallError(
            f"the {split} split of {corpus.prefix} has {len(documents)} of {corpus.manifest.documents} documents and "
            f"{tokens} tokens, and one sample takes train.sequence_length + 1 = {sequence_length + 1}; change "
            f"data.split, use {name}, or lower train.sequence_length"
        )
