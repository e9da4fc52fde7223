"""One epoch of one source, cut into rows of T+1 tokens by megatron-core's GPTDataset.

GPTDataset shuffles the documents, joins them, and cuts the stream into rows that overlap by the one token that is a
label only. One method of it is replaced, for two reasons: its order of rows depends on how many are asked for (here
rows stay in stream order, and the sampler permutes them), and global rank 0 alone writes its index cache, file by
file (here `index_cache`, on any rank).

Imports megatron-core, which takes seconds: import this module where it is needed.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orthros_train.data.corpus import Corpus
from orthros_train.data.index_cache import cached_arrays

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # megatron-core's import warns of optional packages
    from megatron.core.datasets import helpers
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

_CACHE_VERSION = 1


class _CorpusTokenizer:
    """What GPTDatasetConfig reads of a tokenizer."""

    pad = -1  # no padding: an epoch's last partial row is dropped

    def __init__(self, corpus: Corpus) -> None:
        self.vocab_size = corpus.manifest.tokenizer.vocab_size
        self.eod = corpus.manifest.tokenizer.eod_id
        self.unique_identifiers = {"fingerprint": corpus.manifest.tokenizer.fingerprint}


class PackedRows(GPTDataset):
    """Rows of T+1 tokens over a range of documents; `len()` of them make one epoch.

    Args:
        corpus: the source.
        documents: which of its documents.
        sequence_length: T.
        seed: of the order in which documents are joined.
        cache_dir: of the index.
    """

    def __init__(self, corpus: Corpus, documents: range, sequence_length: int, seed: int, cache_dir: Path) -> None:
        self._cache_dir = cache_dir
        self._corpus = corpus
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=sequence_length,
            blend=([str(corpus.prefix)], None),
            split="1",
            tokenizer=_CorpusTokenizer(corpus),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
        )
        super().__init__(
            indexed_dataset=corpus.indexed,
            dataset_path=str(corpus.prefix),
            indexed_indices=np.arange(documents.start, documents.stop, dtype=np.int32),
            num_samples=None,  # one epoch
            index_split=Split.train,
            config=config,
        )

    def row(self, number: int) -> NDArray[np.int64]:
        """(T+1,) token ids of row `number`, in stream order."""
        return self._query_document_sample_shuffle_indices(number)[0]

    def _build_document_sample_shuffle_indices(self) -> tuple[NDArray[Any], NDArray[Any], Sequence[int]]:
        """Documents in the order in which they are joined, where each row starts in it, and rows in stream order."""
        key = [
            _CACHE_VERSION,
            self._corpus.manifest.idx.sha256,
            int(self.indices[0]),
            len(self.indices),
            self.config.sequence_length,
            self.config.random_seed,
        ]
        arrays = cached_arrays(
            self._cache_dir,
            hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32],
            ("documents", "rows"),
            self._build_index,
        )
        return arrays["documents"], arrays["rows"], range(len(arrays["rows"]) - 1)

    def _build_index(self) -> dict[str, NDArray[Any]]:
        documents = self.indices.copy()
        np.random.RandomState(self.config.random_seed).shuffle(documents)
        rows = helpers.build_sample_idx(
            sizes=self.dataset.sequence_lengths.copy(),
            document_indices=documents,
            sequence_length=self.config.sequence_length,
            num_epochs=1,
            tokens_per_epoch=self._get_num_tokens_per_epoch(),
            drop_last_partial_sequence=True,
            add_extra_token_to_sequence=True,
        )
        return {"documents": documents, "rows": rows}
