"""Fine-tuning samples: rows of whole conversations, a pure function of the global index as in pretraining.

* Conversations are packed into rows once, by the seed; each epoch visits all rows in an order of its own. So the order
  depends on data, sequence length and seed alone: not on train.steps, ranks or micro-batch size.
* A row's conversations are segments: no token sees another one. The rest of a row is padding, a segment without labels.
* Train, validation and test are drawn by conversation, the same ones for every seed.
* How many output positions a row has is known without reading it.
"""

from __future__ import annotations

import hashlib
import json
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from orthros_train.config import Config
from orthros_train.config.sft import SFTSection, SFTSource
from orthros_train.data.chat_template import ChatTemplate
from orthros_train.data.permutation import shuffled
from orthros_train.data.pretraining import Sample, SplitName, SplitTooSmallError, split_documents, split_shares
from orthros_train.data.sample_order import SampleOrder
from orthros_train.data.segments import IGNORED_LABEL
from orthros_train.data.sft_encoding import EncodedSource
from orthros_train.data.sft_overlap import why_overlapping
from orthros_train.data.sft_packing import Packing, one_each, pack
from orthros_train.data.tokenizers import Tokenizer
from orthros_train.errors import InputError

_ORDER_VERSION = 1  # of the map from index to sample; part of the fingerprint


class SFTData:
    """The samples of one split. `sample` may be called from several threads.

    Args:
        config: its data, train.sequence_length and train.seed are read.
        tokenizer: the run's.
        split: which share of the conversations. With `data.sft.validation` named, validation is all of those sources,
            and the validation share of the training sources stays with training.

    Attributes:
        template: of the conversations.
        fingerprint: SHA-256 of all that decides which tokens sample i holds.
        epoch_sizes: rows that one epoch of each source has.
        notes: lines about what was read, for people.

    Raises:
        InputError: a source or the chat template is refused, or a validation source is, or may be, also trained on.
        SplitTooSmallError: a source has no conversation in this split.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, split: SplitName) -> None:
        section = config.data.sft
        self._length, self._fill = config.train.sequence_length, tokenizer.eod_id
        sources = _sources(section, split)
        self.template = ChatTemplate(tokenizer, section)
        self.notes: list[str] = []
        shares = split_shares(config.data.split, section.validation is not None, split)
        cache_dir = None if config.data.cache_dir is None else Path(config.data.cache_dir)
        key = f"{config.train.seed}/sft/{split}"
        self._sources: list[EncodedSource] = []
        self._packings: list[Packing] = []
        for number, source in enumerate(sources):
            encoded = EncodedSource(source, section, self.template, self._length, cache_dir)
            counts = encoded.counts.describe(section.too_long, self._length)
            chosen = _of_split(source, len(encoded.lengths), shares, split, counts)
            packing = (
                pack(chosen, encoded.lengths, self._length, f"{key}/pack/{number}")
                if section.packing
                else one_each(chosen)
            )
            filled = int(encoded.lengths[packing.members].sum()) / (len(packing) * self._length)
            rows = f"{len(chosen):,} in {len(packing):,} rows, filled to {filled:.0%}"
            self.notes.append(f"{source.label}: {counts}; {split}: {rows}")
            self._sources.append(encoded)
            self._packings.append(packing)
        self._outputs = [p.sums(s.outputs) for s, p in zip(self._sources, self._packings, strict=True)]
        self.epoch_sizes = tuple(map(len, self._packings))
        self._order = SampleOrder([source.weight for source in sources], self.epoch_sizes, f"{key}/rows")
        identity = [_ORDER_VERSION, key, self._length, self._fill, section.packing, self._order.shares, shares]
        identity += [source.digest for source in self._sources]
        self.fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()

    def sample(self, index: int) -> Sample:
        """Sample `index` >= 0 of the split's endless order."""
        source, _, number = self.sample_id(index)
        input_ids = np.full(self._length, self._fill, dtype=np.int64)
        labels = np.full(self._length, IGNORED_LABEL, dtype=np.int64)
        document_ids = np.zeros(self._length, dtype=np.int64)
        end = 0
        for document, member in enumerate(self._packings[source].row(number)):
            conversation = self._sources[source][int(member)]
            start, end = end, end + len(conversation.tokens)
            input_ids[start:end], labels[start:end] = conversation.tokens, conversation.labels
            document_ids[start:end] = document
            document_ids[end:] = document + 1  # what no conversation takes is padding
        return Sample(input_ids, labels, document_ids)

    def sample_id(self, index: int) -> tuple[int, int, int]:
        """(source, epoch, row of the source) of sample `index`: what it holds, without reading it."""
        return self._order[index]

    def output_count(self, index: int) -> int:
        """Output positions of sample `index`, at least 1."""
        source, _, number = self.sample_id(index)
        return int(self._outputs[source][number])


def _sources(section: SFTSection, split: SplitName) -> list[SFTSource]:
    if not section.train:
        raise InputError("data.sft.train names no source; add one, for example data.sft.train=[{path: chats.jsonl}]")
    if section.validation is None or split != "validation":
        return section.train
    for source, trained in product(section.validation, section.train):
        remedy = why_overlapping(source, trained)
        if remedy is not None:
            raise InputError(
                f"data.sft.validation names {source.label}, which data.sft.train trains on (as {trained.label}): "
                f"{remedy}, or leave data.sft.validation out and use data.split"
            )
    if not section.validation:
        raise InputError("data.sft.validation is empty; name a source or leave it out")
    return section.validation


def _of_split(
    source: SFTSource, count: int, shares: tuple[float, float, float], split: SplitName, counts: str
) -> NDArray[np.int64]:
    """The conversations of a split, in increasing order; drawn, since files are often sorted by topic."""
    part = split_documents(count, shares, split)
    if len(part) == 0:
        raise SplitTooSmallError(
            f"the {split} split of {source.label} has no conversation ({counts}); change data.split, "
            "data.sft.too_long or train.sequence_length, or use "
            + ("data.sft.validation" if split == "validation" else "more conversations")
        )
    return np.sort(shuffled(count, "split of conversations")[part.start : part.stop])
